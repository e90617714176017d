"""Shared test setting: shapes in annotations are checked at run time, by beartype, in tests only."""

from jaxtyping import install_import_hook

install_import_hook(["qkscope.core", "qkscope.analyses"], "beartype.beartype")
