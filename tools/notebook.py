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
        "# A first look\n\nWhich heads of a model look at position, and which at content? This notebook measures one "
        "checkpoint of the small model that comes with qkscope (8 layers of 4 query heads, trained at 1,024 "
        "tokens), in "
        "about half a minute. Put your own model, tokenizer and texts in their place.",
    ),
    (
        "code",
        "from importlib.util import find_spec\nfrom pathlib import Path\n\n"
        "if find_spec('qkscope') is None:  # as in Colab: upload a wheel beside the notebook\n"
        "    wheels = sorted(str(path) for path in Path().glob('qkscope-*.whl'))\n"
        "    if not wheels:\n"
        "        raise ImportError(\"install qkscope in a checkout of its repository: pip install '.[capture]'\")\n"
        "    package = f'qkscope[capture] @ file://{Path(wheels[-1]).absolute()}'\n"
        '    %pip install --quiet "{package}"',
    ),
    (
        "code",
        "import qkscope\nfrom qkscope.data import family\nfrom transformers import AutoModelForCausalLM, "
        "AutoTokenizer\n\n"
        "checkpoint = next(found for found in family.CHECKPOINTS if found.name == 'pretrain-step-3000')\n"
        "model = AutoModelForCausalLM.from_pretrained(checkpoint.folder).eval()\n"
        "tokenizer = AutoTokenizer.from_pretrained(family.tokenizer())\n"
        "texts = [path.read_text() for path in family.some_texts(8)]\n"
        "run = qkscope.capture_model(model, texts, tokenizer, window=1024, folder='run', progress=False)\nrun",
    ),
    (
        "markdown",
        "## The answer for every head\n\nThe score of a query and a key is a sum of four terms: *position* (where both "
        "are), *key* (which key it is), *query* (which query it is) and *content* (how the two agree). A head's "
        "*parts* say "
        "how much of the variance of its scores each term accounts for; they sum to 1. `head_class` names the "
        "largest, if it "
        "is the largest beyond its 95% interval.",
    ),
    (
        "code",
        "positional = run.top('part_position', 5)\n"
        "positional[['layer', 'head', 'part_position', 'part_position_low', 'part_position_high', 'part_content', "
        "'head_class', 'decay']].round(3)",
    ),
    (
        "code",
        "content = run.top('part_content', 5)\n"
        "content[['layer', 'head', 'part_content', 'part_content_low', 'part_content_high', 'part_position', "
        "'head_class', 'decay']].round(3)",
    ),
    ("code", "scores = qkscope.scores('run')\nscores['head_class'].value_counts()"),
    (
        "markdown",
        "## Two heads\n\n`decay` is the number of logits by which the mean score falls when the distance to the key "
        "doubles. `ap_fixed_overall` (plasticity) is 1 if the content of the query decides which of two keys "
        "gets the higher "
        "score, and 0 if position or the keys have fixed it.",
    ),
    (
        "code",
        "first, last = (tuple(int(number) for number in table.loc[0, ['layer', 'head']]) "
        "for table in (positional, content))\n"
        "for layer, head in (first, last):\n"
        "    one = run.head(layer, head)\n"
        "    print(f'l{layer:02d}h{head:02d} {one.head_class}: position {one.part_position:.0%}, content "
        "{one.part_content:.0%}, decay {one.decay:+.2f}, plasticity {one.ap_fixed_overall:.2f}')",
    ),
    ("code", "qkscope.plot.distance('run', heads=[first, last])"),
    (
        "markdown",
        "## All heads in one picture\n\nEach bar is a head, from the most positional to the least.",
    ),
    (
        "code",
        "import matplotlib.pyplot as plt\n\n"
        "from qkscope.figures.scoreterms import TERM_COLOURS  # the colours of the report\n\n"
        "ordered = scores.sort_values('part_position', ascending=False)\n"
        "names = [f'l{row.layer:02d}h{row.head:02d}' for row in ordered.itertuples()]\n"
        "fig, axes = plt.subplots(figsize=(10, 3.6), layout='constrained')\n"
        "bottom = 0\n"
        "for term, colour in TERM_COLOURS.items():\n"
        "    part = ordered[f'part_{term}'].clip(lower=0).to_numpy()\n"
        "    axes.bar(names, part, bottom=bottom, color=colour, label=term, width=0.85)\n"
        "    bottom = bottom + part\n"
        "axes.tick_params(axis='x', rotation=90, labelsize=7)\n"
        "axes.set(ylabel='part of the scores', title='What the scores of each head are made of')\n"
        "axes.margins(x=0.01)\n"
        "axes.legend(frameon=False, ncols=4, loc='upper center', bbox_to_anchor=(0.5, -0.22))\n"
        "axes.spines[['top', 'right']].set_visible(False)\n"
        "fig.savefig('first_look.png', dpi=110)",
    ),
    (
        "markdown",
        "Random weights show that the class is not an artefact: they tell keys hardly apart, and every head is "
        "*flat*. Next: "
        "`qkscope.write_report(run, 'report')` for all tables, figures and the explorer.",
    ),
    (
        "code",
        "random = AutoModelForCausalLM.from_config(model.config).eval()\n"
        "untrained = qkscope.capture_model(random, texts, tokenizer, window=256, progress=False)\n"
        "qkscope.scores(untrained)['head_class'].value_counts()",
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
    """Run the notebook in a folder, where it leaves its picture; without what libraries write to stderr."""
    notebook = build()
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(folder)}}, record_timing=False).execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return notebook


if __name__ == "__main__":
    images = ROOT / "docs" / "images"
    with TemporaryDirectory() as scratch:
        executed = execute(Path(scratch))
        shutil.copy(Path(scratch) / "first_look.png", images)
    nbformat.write(executed, NOTEBOOK)
    print(f"wrote {NOTEBOOK.relative_to(ROOT)} and {(images / 'first_look.png').relative_to(ROOT)}")
