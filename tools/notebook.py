"""Build and execute examples/first_look.ipynb, which also draws docs/images/first_look.png.

python tools/notebook.py
"""

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
NOTEBOOK = ROOT / "examples" / "first_look.ipynb"

CELLS = [
    (
        "markdown",
        "# A first look\n\nFrom a dataset of post-RoPE query and key vectors to tables, one head, and a picture. "
        "The dataset is planted: 48 heads whose drift with position is known. Replace the path by your own "
        "capture, a Hub id or an `hf://` URL.",
    ),
    (
        "code",
        "from importlib.util import find_spec\nfrom pathlib import Path\n\n"
        "if find_spec('qkscope') is None:  # as in Colab; a wheel beside the notebook goes first\n"
        "    wheels = sorted(str(path) for path in Path().glob('qkscope-*.whl'))\n"
        "    package = wheels[-1] if wheels else 'qkscope'\n"
        "    %pip install --quiet {package}",
    ),
    (
        "code",
        "import qkscope\nfrom qkscope.data.planted import write_demo_dataset\n\n"
        "write_demo_dataset('planted')\nrun = qkscope.open('planted')\nrun",
    ),
    ("markdown", "## Tables\n\n`rotated` has one row per head; `_low` and `_high` are 95% intervals by document."),
    (
        "code",
        "rotated = qkscope.rotation(run)\n"
        "rotated[['layer', 'head', 'r_q_a', 'r_k_a', 'bias_window', 'bias_strength', "
        "'bias_strength_low', 'bias_strength_high']].head()",
    ),
    (
        "markdown",
        "How many heads favour later keys beyond doubt? Count the intervals that stay on one side of zero.",
    ),
    (
        "code",
        "recency = (rotated['bias_strength_low'] > 0).sum()\nprimacy = (rotated['bias_strength_high'] < 0).sum()\n"
        "print(f'{recency} heads favour later keys, {primacy} earlier ones, "
        "{len(rotated) - recency - primacy} are undecided')",
    ),
    (
        "code",
        "heads = qkscope.head_table(run)\n"
        "heads.groupby('layer')['taxonomy_published'].value_counts().unstack(fill_value=0)",
    ),
    (
        "markdown",
        "The published positional variance weighs each class's r² by *pooled* variance; the exact one is a share "
        "of the class's own. They differ, and both are in the table.",
    ),
    ("code", "heads[['posvar_q_published', 'posvar_q', 'posvar_k_published', 'posvar_k']].describe().round(3)"),
    ("markdown", "## One head"),
    ("code", "head = run.head(1, 5)\nhead"),
    (
        "markdown",
        "Queries and keys in the plane of the drift axis *a* and the separation axis *b*, and every head on "
        "component 0. Light is early, dark is late.",
    ),
    (
        "code",
        "import matplotlib.pyplot as plt\nimport numpy as np\n\n"
        "from qkscope.figures.style import CLASSES  # the colours of the report\n\n"
        "fig, (left, right) = plt.subplots(1, 2, figsize=(10, 4.4), layout='constrained')\n"
        "for kind, colours in (('q', 'Blues'), ('k', 'Reds')):\n"
        "    points = head.projections(kind)\n"
        "    shade = 0.25 + 0.75 * points['position'] / points['position'].max()\n"
        "    left.scatter(points['a'], points['b'], c=plt.get_cmap(colours)(shade), s=4, linewidths=0)\n"
        "    early, late = (points[points['position'].between(*span)] for span in ((0, 800), (7392, 8192)))\n"
        "    left.annotate('', xy=(late['a'].mean(), late['b'].mean()), "
        "xytext=(early['a'].mean(), early['b'].mean()), arrowprops={'arrowstyle': '-|>', 'lw': 1.6})\n"
        "    x = points['a'].max() + 0.4\n"
        "    left.text(x, points['b'].mean(), {'q': 'queries', 'k': 'keys'}[kind], "
        "color=plt.get_cmap(colours)(0.85), va='center')\n"
        "left.set_xlim(right=left.get_xlim()[1] + 2.5)\n"
        "left.set(xlabel='axis a: drift with position', ylabel='axis b: queries apart from keys', "
        "title=f'head {head.id}: early to late')\n\n"
        "first = qkscope.pca(run).query('pc == 0')\n"
        "for kind, group in first.groupby('taxonomy'):\n"
        "    spread = np.abs(group[['r_q_low', 'r_q_high']].to_numpy().T - group['r_q'].to_numpy())\n"
        "    right.errorbar(group['r_q'], group['r_k'], xerr=spread, fmt='o', ms=4, lw=0.8, color=CLASSES[kind], "
        "label=kind)\n"
        "for level in (0.3, 0.7):\n"
        "    right.axvline(level, color='0.85', lw=0.8, zorder=0)\n"
        "    right.axhline(level, color='0.85', lw=0.8, zorder=0)\n"
        "right.set(xlabel='r_q on component 0', ylabel='r_k on component 0', xlim=(-0.05, 1.02), ylim=(-0.05, 1.02), "
        "title='48 planted heads, with 95% intervals of r_q')\n"
        "right.legend(frameon=False, fontsize=8, loc='upper left')\n"
        "for axes in (left, right):\n    axes.spines[['top', 'right']].set_visible(False)\n"
        "fig.savefig('first_look.png', dpi=110)",
    ),
]


def build() -> nbformat.NotebookNode:
    """The notebook, not yet executed."""
    cells = []
    for number, (kind, text) in enumerate(CELLS):
        make = nbformat.v4.new_markdown_cell if kind == "markdown" else nbformat.v4.new_code_cell
        cells.append(make(text, id=f"cell-{number:02d}"))
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    return nbformat.v4.new_notebook(cells=cells, metadata=kernel)


def execute(folder: Path) -> nbformat.NotebookNode:
    """Run the notebook in a folder, where it leaves its picture."""
    notebook = build()
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(folder)}}, record_timing=False).execute()
    return notebook


if __name__ == "__main__":
    images = ROOT / "docs" / "images"
    with TemporaryDirectory() as scratch:
        executed = execute(Path(scratch))
        shutil.copy(Path(scratch) / "first_look.png", images)
    nbformat.write(executed, NOTEBOOK)
    print(f"wrote {NOTEBOOK.relative_to(ROOT)} and {(images / 'first_look.png').relative_to(ROOT)}")
