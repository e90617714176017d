"""``qkscope effects`` and ``qkscope reach`` on a tiny model: tables, the cut, and every refusal in one line."""

from __future__ import annotations

import json
import re

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import qkscope
from qkscope.cause.choice import (
    Cut,
    CutLimits,
    agreement_with,
    auc,
    choose,
    every_cut,
    longer_than,
    query_head_table,
    read_list,
    write_cut,
)
from qkscope.cli.main import app
from qkscope.errors import CaptureError, ConfigError
from tests.capture.conftest import WORDS, save
from tests.capture.families import families

pytestmark = pytest.mark.xdist_group("cause")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A model, a run of it on eight texts, and eight other texts."""
    folder = tmp_path_factory.mktemp("cause")
    model = save(families()["llama"], folder / "model")
    rng = np.random.default_rng(0)
    for number in range(16):
        part = folder / ("means" if number < 8 else "other")
        part.mkdir(exist_ok=True)
        (part / f"{number:02d}.txt").write_text(" ".join(rng.choice(WORDS, 160)))
    ran("capture", model, "--texts", folder / "means", "--window", 144, "--dtype", "float32", "-o", folder / "run")
    return folder


def ran(*arguments, code: int = 0) -> str:
    done = CliRunner().invoke(app, [*map(str, arguments)])
    assert done.exit_code == code, done.output
    return done.output


def test_a_capture_ends_with_the_loss_of_some_tokens_and_the_next_command(place):
    said = ran("capture", place / "model", "--texts", place / "other", "--window", 144, "-o", place / "again")
    found = re.search(r"mean loss \d\.\d{3} nats per token, over ([\d,]+) of ([\d,]+) tokens\n", said)
    measured, in_all = (int(count.replace(",", "")) for count in found.groups())
    assert 0 < measured <= in_all == 8 * 144
    assert f"wrote {place / 'again'}; next: qkscope report {place / 'again'} -o report\n" in said


def effects(place, *more, code: int = 0, texts: str = "other") -> str:
    given = ["--texts", place / texts, "--dtype", "float32", "-o", place / "out", *more]
    return ran("effects", place / "model", place / "run", *given, code=code)


def test_effects_writes_both_tables_and_says_what_it_costs(place):
    said = effects(place, "--passes", 8, "--measure", 2, "--window", 64)
    assert "without position in 16 heads: " in said
    assert "without a random direction as large as drift in 16 heads: " in said
    assert "without control" not in said
    table = pd.read_csv(place / "out" / "effects.csv")
    assert len(table) == 16 * 4
    assert table["chosen"].value_counts().to_dict() == {"random": 4, "strongest": 4}
    measured = table["kl"].notna()
    assert (measured == table["chosen"].notna()).all()
    assert (table["fisher_information_low"] <= table["fisher_information"]).all()
    assert (table["fisher_information"] <= table["fisher_information_high"]).all()
    assert np.allclose(table["kl_predicted"], table["fisher_information"] / 2)
    together = pd.read_parquet(place / "out" / "effects_together.parquet")
    assert set(together["change"]) == {"position", "key", "query", "content", "drift", "control"}
    whole = together[together["over"] == "all"].set_index("change")["kl"]
    assert whole["content"] > whole["control"]
    assert not (place / "out" / "in-progress").exists()
    assert effects(place, "--passes", 0, "--measure", 0, "--terms", "key", "--window", 64)
    assert set(pd.read_csv(place / "out" / "effects.csv")["term"]) == {"key"}


def test_a_measurement_says_what_it_takes_before_it_starts_and_names_heads_at_the_end(place):
    lines = effects(place, "--passes", 8, "--measure", 2, "--window", 64).splitlines()
    (plan,) = [
        number
        for number, line in enumerate(lines)
        if re.match(r"about \d+ (second|minute)s?: forward passes over 64 ", line)
    ]
    assert "32 to estimate all terms, 64 to measure 2 heads one by one, 56 to measure them together" in lines[plan]
    assert plan < next(number for number, line in enumerate(lines) if "without position in 16 heads: " in line)
    named = [line for line in lines if "content matters most in l0" in line]
    assert len(named) == 1
    assert re.search(r"l\d\dh\d\d \([\de.-]+, (estimated|measured)\)", named[0])
    assert "passes over 64 tokens" in effects(place, "--plan", "--window", 64, "-o", place / "planned")
    assert not (place / "planned").exists()


def test_named_heads_are_measured_beside_as_many_random_ones(place):
    said = effects(place, "--heads", "l01h02,l03h00", "--passes", 4, "--max-docs", 2, "--window", 32, "--terms", "key")
    assert "without key in 2 named heads: " in said
    assert "without key in 2 random heads: " in said
    assert "nan" not in said, "two documents give no interval"
    table = pd.read_csv(place / "out" / "effects.csv")
    assert table["chosen"].tolist() == ["named", "named"]
    assert table[["layer", "head"]].to_numpy().tolist() == [[1, 2], [3, 0]]
    together = pd.read_csv(place / "out" / "effects_together.csv").query("over == 'all'")
    assert together[["change", "heads", "n_heads"]].to_numpy().tolist() == [
        ["control", "named", 2], ["drift", "named", 2], ["key", "named", 2], ["key", "random", 2]
    ]  # fmt: skip
    assert (together["window"] == 32).all()


def test_texts_too_short_for_a_cut_are_refused_before_anything_is_written(place):
    given = ["-o", place / "none", "--cut", 64, "--measure", place / "model", "--texts", place / "other"]
    assert "--window 128 is too short for --cut 64: half of each text must be longer" in ran(
        "reach", place / "run", *given, "--window", 128, code=2
    )
    assert "is too short for a window of 64" in ran(
        "reach", place / "run", *given, "--bos", "--texts", short(place), code=2
    )
    assert not (place / "none").exists()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--cut", 48], "reach is known for windows of 64; got 48"),
        (["--cut", 16], "reach is known for windows of 64; got 16"),
        (["--cut", 64, "--by", "size"], "unknown order 'size'"),
        (
            ["--cut", 128, "--window", 256],
            "--window belongs to --measure; give the model with --measure and --cut",
        ),
        (["--cut", 64, "--window", 256], "--window belongs to --measure"),
        (["--texts", "OTHER", "--also-keep", 0.2], "--also-keep and --texts belong to --measure"),
        (["--plan"], "--plan says how long --measure would take; give the model and --texts"),
        (["--plan", "--measure", "MODEL", "--texts", "OTHER"], "--measure needs --cut"),
    ],
)
def test_what_reach_cannot_do_is_refused_before_anything_is_written(place, given, words):
    names = {"MODEL": place / "model", "OTHER": place / "other"}
    given = [names.get(word, word) for word in given]
    assert words in ran("reach", place / "run", "-o", place / "refused", *given, code=2)
    assert not (place / "refused").exists()


def test_a_list_of_another_model_is_refused_before_anything_is_written(place):
    (place / "others.json").write_text('{"50-0": 1.0, "50-1": 0.5}')
    given = ["-o", place / "unlisted", "--against", place / "others.json"]
    assert "have 0 heads in common; is it of the same model?" in ran("reach", place / "run", *given, code=2)
    assert not (place / "unlisted").exists()


def test_the_plan_of_a_cut_writes_nothing(place):
    given = ["--cut", 64, "--measure", place / "model", "--texts", place / "other", "--dtype", "float32", "--plan"]
    said = ran("reach", place / "run", "-o", place / "unplanned", *given)
    assert re.search(r"forward passes over 144 tokens of .* to measure \d+ cuts", said)
    assert "wrote" not in said
    assert not (place / "unplanned").exists()


def short(place):
    (place / "short.txt").write_text(" ".join(WORDS[:3] * 30))
    return place / "short.txt"


def test_what_cannot_be_had_is_one_line(place):
    refusals = {
        ("--terms", "colour"): "unknown term 'colour'; choose from position, key, query, content",
        ("--heads", "l09h00"): "has no head l09h00; see run.heads",
        ("--heads", "nine"): "expected query heads such as l04h01 or (4, 1), got 'nine'",
    }
    for given, words in refusals.items():
        assert words in effects(place, *given, code=2)
    assert "00.txt and 7 more are also in" in effects(place, code=2, texts="means")
    assert "run.json" in ran("effects", place / "model", place / "nowhere", "--texts", place / "other", code=2)


def test_another_model_is_refused(place):
    other = save(families()["llama3 scaling"], place / "scaled")
    given = ["--texts", place / "other", "--dtype", "float32", "-o", place / "out"]
    assert "layer 0: the run has other rotary frequencies" in ran("effects", other, place / "run", *given, code=2)


def test_reach_chooses_and_measures_a_cut_that_runs(place):
    given = ["--texts", place / "other", "--dtype", "float32", "--draws", 2, "--max-docs", 4]
    said = ran("reach", place / "run", "-o", place / "reach", "--cut", 64, "--measure", place / "model", *given)
    assert "4 of 8 key heads cut to 64 tokens" in said
    assert said.count("watching changes no bit") == 1, "once per command, not once per cut"
    assert re.search(r"attention beyond 64 tokens: most in l0\dh0\d \(\d+%\)", said)
    assert re.search(r"about \d+ seconds?: forward passes over 144 tokens of .* to measure \d+ cuts", said)
    cut = json.loads((place / "reach" / "cut.json").read_text())
    assert (cut["window"], cut["sinks"], cut["by"], len(cut["heads"])) == (64, 4, "far", 4)
    gates = np.loadtxt(place / "reach" / "full_attention_heads.tsv")
    assert gates.shape == (4, 2)
    assert {(layer, head) for layer, head in zip(*np.nonzero(gates < 0.5), strict=True)} == set(
        map(tuple, cut["heads"])
    )
    assert json.loads((place / "reach" / "config.json").read_text()) == {"sink_size": 4, "recent_size": 64}
    table = pd.read_csv(place / "reach" / "cuts.csv")
    assert set(table["order"]) == {"none", "far", "area", "lock", "measured", "reversed", "all", "random"}
    orders = dict.fromkeys(("far", "area", "lock", "measured", "reversed"), 6)
    assert table.groupby("order").size().to_dict() == orders | {"none": 2, "all": 2, "random": 4}
    assert sorted(table[table["order"] == "far"]["share_cut"]) == [0.25, 0.25, 0.5, 0.5, 0.75, 0.75]
    from qkscope.capture import model as models
    from qkscope.capture.options import ModelOptions

    loaded = models.load_model(ModelOptions(str(place / "model"), dtype="float32"))
    with qkscope.intervene.windowed(loaded, place / "reach" / "cut.json"):
        pass
    with qkscope.cut_cache(loaded, place / "reach" / "cut.json") as cache:
        found = {(n, head) for n, layer in enumerate(cache.layers) for head in getattr(layer, "windows", ())}
        assert found == set(map(tuple, cut["heads"]))
    against = ran(
        "reach", place / "run", "-o", place / "reach", "--against", place / "reach" / "full_attention_heads.tsv"
    )
    assert "predicted_beyond" in against
    assert len(pd.read_csv(place / "reach" / "against.csv")) == 5
    assert (place / "reach" / "against.png").read_bytes().startswith(b"\x89PNG")


def test_reach_refuses_what_it_does_not_know(place):
    out = ["-o", place / "reach2"]
    assert "reach is known for windows of 64; got 48" in ran("reach", place / "run", *out, "--cut", 48, code=2)
    assert "unknown order 'size'; choose from far, area" in ran("reach", place / "run", *out, "--by", "size", code=2)
    assert "--measure needs --cut" in ran("reach", place / "run", *out, "--measure", "x", code=2)
    (place / "list.json").write_text('{"a": 1}')
    assert "is not a list of heads" in ran("reach", place / "run", *out, "--against", place / "list.json", code=2)


def test_a_cut_of_another_model_is_refused(place):
    from transformers import AutoModelForCausalLM

    ran("reach", place / "run", "-o", place / "mine", "--cut", 64)
    model, path = AutoModelForCausalLM.from_pretrained(place / "model", dtype="float32"), place / "mine" / "cut.json"
    content = json.loads(path.read_text())
    for use in (qkscope.cut_cache, lambda model, cut: qkscope.intervene.windowed(model, cut).__enter__()):
        for changes, message in (
            ({"weights": "0"}, f"{path} is a cut of other weights of this model"),
            ({"parameters": 7}, f"{path} is a cut of another model \\(LlamaForCausalLM with 7 parameters; this is"),
            ({"window": 2}, f"{path} keeps the first 4 tokens and a window of 2"),
        ):
            path.write_text(json.dumps(content | changes))
            with pytest.raises((CaptureError, ConfigError), match=message):
                use(model, path)
        path.write_text(json.dumps({key: value for key, value in content.items() if key != "weights"}))
        with pytest.raises(CaptureError, match="does not record its model's weights"):
            use(model, path)
    path.write_text(json.dumps(content | {"dtype": "bfloat16", "weights": "0"}))
    qkscope.cut_cache(model, path).close()  # weights of another dtype are not compared, which is logged


def test_layers_are_chosen_whole_and_sinks_are_warned_of(place):
    said = ran("reach", place / "run", "-o", place / "layers", "--cut", 64, "--by-layer", "--sinks", 0)
    assert "4 of 8 key heads cut to 64 tokens, in 2 layers" in said
    assert "--sinks 0 is expensive" in said
    cut = json.loads((place / "layers" / "cut.json").read_text())
    assert (cut["by_layer"], cut["sinks"]) == (True, 0)
    layers = {layer for layer, _ in cut["heads"]}
    assert cut["heads"] == [[layer, head] for layer in sorted(layers) for head in range(2)]
    assert "give --sinks of 64 or less" in ran("reach", place / "run", "--cut", 64, "--sinks", 65, code=2)
    run = qkscope.open(place / "run")
    assert [list(head) for head in qkscope.cut(run, 64, by_layer=True).heads] == cut["heads"]


def test_measuring_asks_for_passkeys_and_for_the_first_tokens(place, monkeypatch):
    arguments = ["reach", place / "run", "-o", place / "asked", "--cut", 64, "--measure", place / "model"]
    arguments += ["--texts", place / "other", "--max-docs", 2, "--dtype", "float32", "--also-keep", 0.5, "--draws", 1]
    refused = ran(*arguments, "--needles", 1, code=2)
    assert "texts of 144 tokens are too short to ask for passkeys; give texts of 512 or more, or leave out" in refused
    monkeypatch.setattr("qkscope.cause.needles.why_not", lambda *_: None)
    said = ran(*arguments, "--needles", 2, "--sinks", 0)
    assert re.search(r"\d+ to ask for passkeys and pairs with 6 cuts", said)
    assert "passkeys: this model finds none of 20, even without a cut" in said
    assert re.search(r"--sinks 0 costs [+-]\d\.\d{3} nats per token on text and [+-]\d\.\d{3} on the second copy", said)
    table = pd.read_csv(place / "asked" / "needles.csv")
    assert set(table["order"]) == {"none", "far", "area", "lock", "measured", "random"}
    assert table.groupby(["order", "text"]).size().eq(11).all()
    assert table["n_questions"].isin([2, 20]).all()


def test_orders_and_lists_by_hand(tmp_path):
    heads = pd.DataFrame(
        [(layer, head, head // 2, layer + head / 8) for layer in range(4) for head in range(4)],
        columns=["layer", "head", "k_head", "predicted_beyond"],
    ).assign(mass_beyond=np.nan, curve_area=0.5, lock_q=0.5, curve_range=1.0)
    cut = choose(heads, "far", 0.5, 64, 4)
    assert cut.heads == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert choose(heads, "far", 0.5, 64, 4, by_layer=True).heads == cut.heads
    turned = heads.assign(predicted_beyond=[0.0, 0.0, 9.0, 9.0] + [1.0] * 12)
    assert choose(turned, "far", 0.25, 64, 4, by_layer=True).heads == [(n, head) for n in (1, 2, 3) for head in (0, 1)]
    for other in every_cut(heads, "far", [0.25], 64, 4, 8, 0, by_layer=True)[2:]:
        assert other.n_units == 3
        assert len(other.heads) == 6
    with pytest.raises(ConfigError, match="--by measured needs a run with --reach-queries"):
        choose(heads, "measured", 0.5, 64, 4)
    (tmp_path / "list.json").write_text(
        json.dumps({f"{h.layer}-{h.head}": [h.predicted_beyond] * 2 for h in heads.itertuples()})
    )
    listed, level = read_list(tmp_path / "list.json")
    assert level == "head"
    agreement = agreement_with(heads.assign(mass_beyond=0.0), listed, level).set_index("column")
    assert agreement.loc["predicted_beyond", "rho"] == pytest.approx(1.0)
    assert agreement.loc["predicted_beyond", "auc"] == 1.0
    assert auc(np.zeros(20), np.arange(20.0)) == 0.5
    with pytest.raises(ConfigError, match="have 0 heads in common"):
        agreement_with(heads.assign(layer=50, mass_beyond=0.0), listed, level)
    reach = heads.drop(columns=["lock_q", "curve_range"]).assign(w=64)
    table = query_head_table({"reach": reach, "position": heads[["layer", "head", "lock_q", "curve_range"]]}, 64)
    assert len(table) == 16


def test_the_python_call_gives_the_same_tables(place):
    from qkscope.capture import model as models
    from qkscope.capture.options import ModelOptions
    from qkscope.cause.effects import EffectOptions

    model = models.load_model(ModelOptions(str(place / "model"), dtype="float32"))
    rng = np.random.default_rng(3)
    texts = [rng.integers(3, 93, 40) for _ in range(4)]
    run = qkscope.open(place / "run")
    tables = qkscope.effects(model, run, texts, options=EffectOptions(passes=4, measure=0), label="tiny")
    assert set(tables) == {"effects", "effects_together"}
    assert tables["effects"]["model"].eq("tiny").all()
    with pytest.raises(ConfigError, match="texts as strings need a tokenizer"):
        qkscope.effects(model, run, ["a text"])
    assert len(qkscope.reach(run)) == 16
    assert len(qkscope.scores(run)) == 16


@pytest.mark.slow
def test_a_report_is_made_of_a_folder_that_has_effects_and_cuts_too(place):
    ran("analyze", place / "run", "-o", place / "all", "--quiet")
    given = ["--texts", place / "other", "--dtype", "float32", "--max-docs", 4]
    ran(
        "effects", place / "model", place / "run", *given, "--passes", 4, "--measure", 4, "-o", place / "all", "--quiet"
    )
    ran(
        "reach",
        place / "run",
        "--cut",
        64,
        "--measure",
        place / "model",
        *given,
        "--draws",
        1,
        "-o",
        place / "all",
        "--quiet",
    )
    ran("report", place / "all", "-o", place / "report", "--quiet")
    page = (place / "report" / "report.html").read_text()
    assert "What it costs to cut key heads to a window" in page
    assert "What the prediction loses without a term" in page


def test_a_list_is_compared_where_nothing_was_measured():
    heads = pd.DataFrame([(layer, head) for layer in range(4) for head in range(4)], columns=["layer", "head"])
    heads = heads.assign(
        predicted_beyond=np.arange(16.0), mass_beyond=np.nan, curve_area=0.5, lock_q=0.5, curve_range=1.0
    )
    listed = pd.Series(np.arange(16.0), index=pd.MultiIndex.from_frame(heads[["layer", "head"]]))
    table = agreement_with(heads, listed, "head").set_index("column")
    assert "mass_beyond" not in table.index
    assert table.loc["predicted_beyond", "rho"] == pytest.approx(1.0)


def test_what_a_sliding_window_cuts_anyway_is_not_chosen():
    heads = pd.DataFrame({"layer": [0, 1], "predicted_beyond": [0.0, 0.5]})
    assert longer_than(heads, {0: 64, 1: None}, 64)["layer"].tolist() == [1]
    with pytest.raises(ConfigError, match="every layer has a sliding window of 64 tokens or less"):
        longer_than(heads, {0: 64, 1: 32}, 64)


def test_gates_of_a_run_of_some_layers_stand_in_their_own_rows(tmp_path):
    scores = pd.Series([0.1, 0.9], index=pd.MultiIndex.from_tuples([(1, 0), (1, 1)], names=["layer", "k_head"]))
    write_cut(tmp_path, Cut(64, 4, [(1, 0)], "far", scores), "m", 0.5, CutLimits(4, {}, (3, 2), {}))
    gates = np.loadtxt(tmp_path / "full_attention_heads.tsv")
    assert gates.tolist() == [[1, 1], [0, 1], [1, 1]]
