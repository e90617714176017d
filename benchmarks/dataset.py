"""Heads per second from a dataset: reading only, reading with both analyses, and the plain way.

    python -m benchmarks.dataset --heads 300 --rows 8000 --d 128 --workers 2

All three read the same parquet files in the same number of processes with one BLAS thread each. The plain way
is pandas, scikit-learn and scipy, head by head; it computes no intervals. What both ways have in common is
compared before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.stats import pearsonr
from sklearn.decomposition import PCA

import qkscope
from qkscope.core.rows import Rows
from qkscope.engine import for_each
from qkscope.heads import HeadId
from qkscope.pipeline import Job, _tasks, analyze, do_task
from qkscope.store.datasets import Dataset, write_dataset
