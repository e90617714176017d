"""The real huggingface_hub client against a Hub on loopback that can be written to, in a process of its own."""

from __future__ import annotations

import copy
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from qkscope.files.checksums import compare, write_checksums
from qkscope.files.hub import one_line
from qkscope.files.pushed import HUB_MARK, HubMark
from qkscope.files.runfolder import write_passage
from qkscope.headids import TERMS
from qkscope.report.values import in_text
from qkscope.results.reader import read_folder
from qkscope.results.side import PASSAGES
from qkscope.results.summary import SUMMARY, read_summary, record_rows, summary_bytes
from tests.capture.families import build, families
from tests.capture.test_run import do
from tests.files.hub_client import Starter
from tests.files.hub_store import HubStore

TOKEN, OTHER = "hf_ofAnn", "hf_ofBob"
REPO, OPEN = "ann/first", "ann/open"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """Two runs, with tables."""
    place = tmp_path_factory.mktemp("made")
    for name, seed in (("run", 3), ("another", 5)):
        texts = [(np.arange(80) * seed + i) % 90 + 3 for i in range(8)]
        do(build(families()["llama"]), texts, place / name, layers=(0,))
        tables = place / name / "tables"
        done = subprocess.run(
            [sys.executable, "-m", "qkscope", "analyze", place / name, "-o", tables, "--workers", "1", "-q"],
            check=False,
        )
        assert done.returncode == 0
    return place


@pytest.fixture
def run(made, tmp_path) -> Path:
    shutil.copytree(made / "run", tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def hub() -> Iterator[HubStore]:
    with HubStore({TOKEN: ("ann", {"ann"}), OTHER: ("bob", {"bob"})}).serving() as hub:
        yield hub


@pytest.fixture(scope="module")
def starter() -> Iterator[Starter]:
    starter = Starter()
    yield starter
    starter.stop()


@dataclass
class Client:
    """The command line, with a token, a home and a Hub."""

    starter: Starter
    hub: HubStore
    home: Path
    token: str | None = TOKEN

    @property
    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        here = {"HF_ENDPOINT": self.hub.url, "HF_HOME": str(self.home), "HF_HUB_DISABLE_XET": "1"}
        return kept | here | ({} if self.token is None else {"HF_TOKEN": self.token})

    def by(self, name: str, token: str | None) -> Client:
        """Somebody else's."""
        return replace(self, home=self.home.with_name(name), token=token)

    def start(self, *words: object, before: str = "") -> int:
        self.home.mkdir(exist_ok=True)
        return self.starter.start(list(map(str, words)), self.environment, self.home, before)

    def __call__(self, *words: object, before: str = "") -> tuple[int, str, str]:
        self.start(*words, before=before)
        code, (out, errors) = self.starter.wait(), ((self.home / name).read_text() for name in ("out", "err"))
        assert self.token is None or self.token not in out + errors
        return code, out, errors

    def works(self, *words: object, before: str = "") -> str:
        code, out, errors = self(*words, before=before)
        assert code == 0, out + errors
        return out

    def fails(self, *words: object, before: str = "") -> str:
        code, out, errors = self(*words, before=before)
        lines = [line for line in errors.splitlines() if line.startswith("error: ")]
        assert (code, len(lines)) == (2, 1), out + errors
        return lines[0].removeprefix("error: ")


@pytest.fixture
def client(starter, hub, tmp_path) -> Client:
    return Client(starter, hub, tmp_path / "home")


@pytest.fixture(scope="module")
def on_hub(starter, made, tmp_path_factory) -> HubStore:
    """A Hub to which the run was pushed twice: for Ann, and for everybody."""
    with HubStore({TOKEN: ("ann", {"ann"})}).serving() as hub:
        client = Client(starter, hub, tmp_path_factory.mktemp("home"))
        client.works("push", made / "run", REPO)
        client.works("push", made / "run", OPEN, "--public")
    return hub


@pytest.fixture
def pushed(hub, on_hub) -> HubStore:
    """The same Hub, in the state after these pushes."""
    hub.repositories, hub.objects = copy.deepcopy((on_hub.repositories, on_hub.objects))
    return hub


def tables_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.suffix in (".csv", ".parquet")}


def analyzed(client: Client, source: object, folder: Path) -> dict[str, bytes]:
    client.works("analyze", source, "--model", "run", "--workers", "1", "-o", folder)
    return tables_of(folder)


def test_what_was_pushed_comes_back_and_gives_the_same_bytes(hub, client, run, tmp_path):
    tables = tables_of(run / "tables")
    shutil.rmtree(run / "tables")  # they are computed
    assert client.works("push", run, REPO) == f"{hub.url}/datasets/{REPO}\n"
    client.works("pull", REPO, "-o", tmp_path / "pulled")
    assert tables_of(tmp_path / "pulled" / "tables") == tables
    assert analyzed(client, tmp_path / "pulled", tmp_path / "a") == tables
    assert analyzed(client, REPO, tmp_path / "b") == tables
    said = json.loads((tmp_path / "b" / "summary.json").read_text())["models"]["run"]["dataset"]
    commit = hub.repositories[REPO].branches["main"]
    assert (said["kind"], said["repo"], said["commit"]) == ("run", REPO, commit)
    verified = client.works("verify", tmp_path / "pulled", "--model", "run")
    assert "names of documents: left out of run.json when the run was pushed" in verified
    assert "0 differences" in verified


def test_pushing_the_same_again_changes_nothing(pushed, client, run):
    commit, asked = pushed.repositories[REPO].branches["main"], len(pushed.asked)
    client.works("push", run, REPO)
    assert pushed.repositories[REPO].branches["main"] == commit
    assert not [line for line in pushed.asked[asked:] if line.startswith(("PUT", "POST"))]


@pytest.mark.slow
def test_a_pulled_run_is_pushed_as_it_is(pushed, client, tmp_path):
    client.works("pull", REPO, "-o", tmp_path / "pulled")
    client.works("push", tmp_path / "pulled", "ann/second")
    first, second = pushed.files(REPO), pushed.files("ann/second")
    differ = {name for name in {*first, *second} if first.get(name) != second.get(name)}
    assert differ == {"README.md", HUB_MARK}  # the card says where it is


def everything(files: dict[str, bytes]) -> str:
    """All that is in files, that of parquet files unpacked."""
    texts = []
    for name, data in files.items():
        if name.endswith(".parquet"):
            table = pq.read_table(io.BytesIO(data))
            texts.append(f"{name} {table.schema} {table.schema.metadata} {table.to_pydict()}")
        else:
            texts.append(f"{name} {data.decode('latin-1')}")
    return "\n".join(texts)


def private(run: Path, tmp_path: Path) -> None:
    """Give a run everything that must not leave the machine."""
    manifest = json.loads((run / "run.json").read_text())
    manifest["model"]["id"] = "/home/ann/hidden-model/weights"
    for number, document in enumerate(manifest["documents"]):
        document["name"] = f"/home/ann/hidden-folder/secret {number}.txt"
    reason = "/home/ann/hidden-folder/secret 0.txt: cannot be read [/home/ann/hidden-cache/x]"
    manifest["left_out"] = [{"document": 0, "reason": reason, "name": manifest["documents"][0]["name"]}]
    (run / "run.json").write_text(json.dumps(manifest))
    write_checksums(run)
    summary = json.loads((run / "tables" / "summary.json").read_text())
    entry = summary["models"]["run"]
    assert entry["dataset"]["path"].startswith("/")
    entry["dataset"]["path"] = str(tmp_path / "hidden place" / "run")
    entry["pca"]["failures"] = [f"l00h00q: no rows [{tmp_path}/hidden place/run/sample/x.parquet]"]
    entry["pca"]["config"]["results_dir"] = "hidden-output/results"
    (run / "tables" / "summary.json").write_text(json.dumps(summary))
    (run / "tables" / "notes.txt").write_text("hidden notes")
    (run / "hidden.log").write_text("hidden log")


def test_neither_names_nor_paths_nor_other_files_are_sent(hub, client, run, tmp_path):
    private(run, tmp_path)
    client.works("push", run, REPO)
    sent = everything(hub.files(REPO))
    assert [word for word in ("hidden", "secret", "/home", str(tmp_path)) if word in sent] == []
    manifest = json.loads(hub.files(REPO)["run.json"])
    assert {entry["name"] for entry in manifest["documents"]} == {entry["digest"] for entry in manifest["documents"]}
    assert manifest["left_out"][0]["reason"] == f"{manifest['documents'][0]['digest']}: cannot be read [x]"
    assert manifest["model"]["id"] == "weights"
    assert manifest["pushed"]["left_out"] == [
        "names of documents", "folder of the model", "paths of documents left out"
    ]  # fmt: skip
    client.works("pull", REPO, "-o", tmp_path / "pulled")
    assert "0 differences" in client.works("verify", tmp_path / "pulled", "--model", "run")
    client.works("push", run, "ann/named", "--with-names")
    sent = everything(hub.files("ann/named"))
    assert "secret 7.txt" in sent
    assert [word for word in ("hidden", "/home", str(tmp_path)) if word in sent] == []


def test_a_passage_of_ones_own_is_sent_only_if_asked(hub, client, run, tmp_path):
    """The bundled passage is sent; a text of the user's own is as private as the documents."""
    tokens = ["submarine", " of", " mine"]
    manifest = json.loads((run / "run.json").read_text())
    layer = manifest["layers"][0]
    shapes = {"q": len(layer["query_heads"]), "k": len(layer["key_heads"])}
    d = pq.read_table(run / "sample" / "l00h00q" / "data.parquet", partitioning=None)["vector"][0]
    write_passage(run, {0: tuple(np.ones((3, heads, len(d.as_py())), np.float32) for heads in shapes.values())})
    scores = pd.DataFrame({"q_token": [0], "k_token": 0, "unit": 1.0} | dict.fromkeys(TERMS, 0))
    for text, sent in ((tokens, False), (["In", " the", " light"], True)):
        (run / "run.json").write_text(json.dumps(manifest | {"passage": {"tokens": text}}))
        passage = scores.assign(model="run", layer=0, head=0, text=text[0])
        PASSAGES.write(run / "tables", passage)
        summary = read_summary(run / "tables")
        record_rows(summary["models"]["run"], PASSAGES.name, passage, {})
        (run / "tables" / SUMMARY).write_bytes(summary_bytes(summary))
        write_checksums(run)
        client.works("push", run, f"ann/{sent}")
        files = hub.files(f"ann/{sent}")
        pushed = json.loads(files["run.json"])
        assert {"passage.safetensors" in files, "tables/passage.parquet" in files, "passage" in pushed} == {sent}
        assert ("a passage of one's own" in pushed["pushed"]["left_out"]) is not sent
        client.works("pull", f"ann/{sent}", "-o", tmp_path / f"{sent}")
        assert compare(tmp_path / f"{sent}") == []
    (run / "run.json").write_text(json.dumps(manifest | {"passage": {"tokens": tokens}}))
    write_checksums(run)
    client.works("push", run, "ann/asked", "--with-tokens")
    assert "passage.safetensors" in hub.files("ann/asked")


@pytest.mark.slow
def test_the_text_of_tokens_is_sent_only_if_asked(hub, client, run, tmp_path):
    path = run / "sample" / "l00h00q" / "data.parquet"
    table = pq.read_table(path, partitioning=None)
    place = table.column_names.index("token_str")
    pq.write_table(table.set_column(place, "token_str", pa.array(["word"] * len(table))), path)
    write_checksums(run)
    client.works("push", run, REPO)
    assert "no text, no token and no token id of theirs" in hub.files(REPO)["README.md"].decode()
    client.works("pull", REPO, "-o", tmp_path / "pulled")
    pulled = pq.read_table(tmp_path / "pulled" / "sample" / "l00h00q" / "data.parquet", partitioning=None)
    assert pulled["token_str"].null_count == len(table)
    for name in ("example_id", "position", "vector"):
        assert pulled[name].to_pylist() == table[name].to_pylist()
    assert compare(tmp_path / "pulled") == []
    manifest = json.loads((tmp_path / "pulled" / "run.json").read_text())
    assert "text of tokens" in manifest["pushed"]["left_out"]
    client.works("push", run, REPO, "--with-tokens")
    sent = pq.read_table(io.BytesIO(hub.files(REPO)["sample/l00h00q/data.parquet"]))
    assert sent["token_str"].to_pylist() == ["word"] * len(table)
    assert "the text of each token that has a sampled vector is" in hub.files(REPO)["README.md"].decode()


def test_the_card_is_of_this_data(hub, client, run):
    client.works("push", run, REPO, "--license", "cc-by-4.0")
    _, head, body = hub.files(REPO)["README.md"].decode().split("---\n", 2)
    said = yaml.safe_load(head)
    assert said["license"] == "cc-by-4.0"
    assert said["size_categories"] == ["n<1K"]
    files = {entry["config_name"]: entry["data_files"] for entry in said["configs"]}
    assert set(files.values()) <= set(hub.files(REPO))
    assert {"heads", "qk", "rotated", "distance", "scores", "runs"} <= set(files)
    heads = pq.read_table(run / "tables" / "heads.parquet").to_pandas()
    share = f"{(heads['decay'] > 0).mean():.0%} of heads score near keys higher"
    assert share in body
    assert f"| attention plasticity, queries turned to one place | {in_text(heads['ap_fixed_overall'].mean())} " in body
    assert "| flat heads, by the parts of their scores | 100% " in body, "random weights"
    assert re.search(r"\| mean over heads \| \w+, window \d+ \|", body), body
    assert "no text, no token and no token id of theirs" in body
    assert f'import datasets, qkscope\n\nheads = datasets.load_dataset("{REPO}", "heads")["train"]' in body
    assert hub.files(REPO)["heads.png"].startswith(b"\x89PNG")
    mark = HubMark.model_validate_json(hub.files(REPO)[HUB_MARK])
    assert set(mark.files) == set(hub.files(REPO)) - {HUB_MARK}


# ---- interruptions ---------------------------------------------------------------------------------


def test_a_push_that_was_killed_resumes_without_sending_again_what_arrived(hub, client, run):
    process: list[int] = []

    def kill(method: str, _: str) -> bool:
        if method == "PUT" and len(hub.sent) == 7:
            os.kill(process[0], signal.SIGKILL)
            return False
        return True

    hub.before = kill
    process.append(client.start("push", run, REPO))
    assert client.starter.wait() == -signal.SIGKILL
    arrived, so_far = set(hub.objects), len(hub.sent)
    assert arrived
    assert hub.files(REPO) == {}, "half a run is visible"
    hub.before = lambda *_: True
    client.works("push", run, REPO)
    assert not arrived & set(hub.sent[so_far:])
    assert HUB_MARK in hub.files(REPO)


@pytest.mark.slow
def test_a_commit_that_was_cut_is_repeated_without_the_files(hub, client, run):
    hub.before = lambda _, path: "/commit/" not in path
    said = client.fails("push", run, REPO)
    assert said.startswith(f"cannot reach the Hub for {REPO} (")
    assert said.endswith("check the network and rerun the same command, which resumes")
    hub.before, so_far = lambda *_: True, len(hub.sent)
    client.works("push", run, REPO)
    assert hub.sent[so_far:] == []


def test_one_cut_connection_is_no_interruption(hub, client, run):
    cut: list[str] = []

    def once(method: str, path: str) -> bool:
        if method == "PUT" and not cut:
            cut.append(path)
            return False
        return True

    hub.before = once
    client.works("push", run, REPO)
    assert cut
    assert HUB_MARK in hub.files(REPO)


FEW = "import qkscope.integrations.hub.upload as upload; upload._FILES_PER_COMMIT = 20"


@pytest.mark.slow
def test_a_large_run_that_is_half_there_is_unfinished_and_resumes(hub, client, run, tmp_path):
    def second(_: str, path: str) -> bool:
        return not ("/commit/" in path and sum("/commit/" in line for line in hub.asked) == 2)

    hub.before = second
    client.fails("push", run, REPO, before=FEW)
    part, whole = len(hub.files(REPO)), len(HubMark.model_validate_json(hub.files(REPO)[HUB_MARK]).files) + 1
    assert 0 < part < whole
    for command in (("pull", REPO, "-o", tmp_path / "out"), ("analyze", REPO, "-o", tmp_path / "out")):
        said = client.fails(*command)
        assert said.startswith(f"the push of hf://datasets/{REPO}@main is unfinished: {whole - part} of {whole - 1} ")
    assert not (tmp_path / "out").exists()
    client.works("push", run, REPO, before=FEW)
    assert len(hub.files(REPO)) == whole
    client.works("pull", REPO, "-o", tmp_path / "out")


def test_a_pull_that_was_killed_resumes_and_leaves_no_half_folder(pushed, client, tmp_path):
    process: list[int] = []

    def fetched() -> list[str]:
        return [line for line in pushed.asked if line.startswith("GET /datasets/") and "/sample/" in line]

    def kill(*_: str) -> bool:
        if len(fetched()) == 3:
            os.kill(process[0], signal.SIGKILL)
            return False
        return True

    pushed.before = kill
    process.append(client.start("pull", REPO, "-o", tmp_path / "out"))
    assert client.starter.wait() == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    complete = {path.parent.name for path in (tmp_path / ".out.pulling" / "sample").glob("*/data.parquet")}
    pushed.before, pushed.asked = (lambda *_: True), []
    client.works("pull", REPO, "-o", tmp_path / "out")
    assert not {line.split("/")[-2] for line in fetched()} & complete
    assert {path.name for path in tmp_path.iterdir() if "out" in path.name} == {"out"}
    names = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert names == set(pushed.files(REPO))


@pytest.mark.slow
def test_a_file_with_another_digest_is_refused_and_fetched_again(pushed, client, run, tmp_path):
    name = "moments/layer-000.safetensors"
    pushed.damaged.add(name)
    for command in (("pull", REPO, "-o", tmp_path / "out"), ("analyze", REPO, "-o", tmp_path / "tables")):
        said = client.fails(*command)
        assert said.startswith(f"{name} of hf://datasets/{REPO}@main differs from its checksum and was removed; rerun")
    assert not (tmp_path / "out").exists()
    pushed.damaged.clear()
    client.works("pull", REPO, "-o", tmp_path / "out")
    assert analyzed(client, REPO, tmp_path / "tables") == tables_of(run / "tables")


# ---- what is there already -------------------------------------------------------------------------


@pytest.mark.slow
def test_something_else_is_replaced_only_if_asked(hub, client, run, made):
    hub.holds(REPO, {"data/train.csv": b"a,b\n"})
    said = client.fails("push", run, REPO)
    assert said == (
        f"{REPO} at main holds files that qkscope did not push (data/train.csv …); choose another name, or --overwrite "
        "to replace them"
    )
    client.works("push", run, REPO, "--overwrite")
    assert "data/train.csv" not in hub.files(REPO)
    said = client.fails("push", made / "another", REPO)
    assert said.startswith(f"{REPO} at main holds something else (run of ")
    assert said.endswith("push to another --revision or name, or --overwrite it")
    before = hub.files(REPO)
    client.works("push", made / "another", REPO, "--revision", "another")
    assert hub.files(REPO) == before
    assert hub.files(REPO, "another")["run.json"] != before["run.json"]
    assert set(hub.files(REPO, "another")) == set(before)
    said = client.fails("push", run / "tables", REPO)
    assert "holds something else (run of " in said


@pytest.mark.slow
def test_repositories_are_private_unless_asked(pushed, client, tmp_path):
    assert (pushed.repositories[REPO].private, pushed.repositories[OPEN].private) == (True, False)
    for token in (OTHER, None):
        stranger = client.by("stranger", token)
        said = stranger.fails("pull", REPO, "-o", tmp_path / "out")
        assert said.startswith(
            f"'{REPO}' is neither a local folder nor a Hub dataset; check the spelling, and run 'hf "
        )
        stranger.works("pull", OPEN, "-o", tmp_path / ("guest" if token is None else "member"))


def test_a_pull_replaces_nothing(pushed, client, tmp_path):
    full = tmp_path / "full"
    full.mkdir()
    (full / "thesis.tex").write_text("x")
    said = client.fails("pull", REPO, "-o", full)
    assert said == f"{full} contains something other than {REPO}; choose another folder"
    client.works("pull", REPO, "-o", tmp_path / "out")
    asked = len(pushed.asked)
    client.works("pull", REPO, "-o", tmp_path / "out")
    assert not [line for line in pushed.asked[asked:] if "/resolve/" in line and HUB_MARK not in line]
    (tmp_path / "out" / "run.json").write_text("{}")
    assert client.fails("pull", REPO, "-o", tmp_path / "out").startswith(f"{tmp_path}/out/run.json differs from what")


# ---- errors ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("pushed")
def test_tokens_that_do_not_work(client, run, tmp_path):
    login = "run 'hf auth login'"
    refused = f"the Hub does not accept this token; {login} again (HF_TOKEN, if it is set, comes first)"
    nobody, wrong = client.by("nobody", None), client.by("wrong", "hf_wrong")
    assert nobody.fails("push", run, REPO) == (f"no Hub token found; {login}, or set HF_TOKEN")
    assert wrong.fails("push", run, REPO) == refused
    assert wrong.fails("pull", REPO, "-o", tmp_path / "out") == refused
    assert client.by("strange", "hf_\u2026").fails("push", run, REPO) == refused
    bob = client.by("bob", OTHER)
    for repo in ("ann/new", REPO):  # the second is private, and so not there for him
        assert bob.fails("push", run, repo) == (
            f"this token may not write to {repo}; use one with write access to it, or a repository of your own"
        )


def test_an_error_that_quotes_the_token_is_shown_without_it(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert one_line(ValueError(f"Illegal header value\n b'Bearer {TOKEN}'")) == "Illegal header value b'Bearer …'"


def test_no_network_is_one_line_that_says_what_to_do(hub, client, run, tmp_path):
    hub.url = "http://127.0.0.1:9"
    assert client.fails("push", run, REPO).startswith(f"cannot reach the Hub for {REPO} (ConnectError: ")
    assert client.fails("pull", REPO, "-o", tmp_path / "out").startswith(
        f"cannot read the dataset {REPO} from the Hub ("
    )


@pytest.mark.usefixtures("pushed")
def test_a_repository_of_somebody_else_cannot_be_changed(client, made):
    bob = client.by("bob", OTHER)
    said = bob.fails("push", made / "another", OPEN, "--overwrite")
    assert said == f"this token may not write to {OPEN}; use one with write access to it, or a repository of your own"


def test_inputs_that_cannot_be_pushed_or_pulled(hub, client, run, tmp_path):
    for name in ("first", "ann/fir st", "ann/first/more", "ann/first..", "-ann/first"):
        assert client.fails("push", "--", run, name).startswith(f"'{name}' cannot be the name of a repository (")
    assert client.fails("push", run, REPO, "--revision", "a b").startswith("'a b' cannot be the name of a branch;")
    said = client.fails("push", tmp_path, REPO)
    assert said == f"{tmp_path} is neither a captured run nor a results folder; give one of them"
    (run / "moments" / "layer-000.safetensors").write_bytes(b"x")
    said = client.fails("push", run, REPO)
    assert said.startswith(f"{run} is not intact: {run}/moments/layer-000.safetensors differs from its checksum;")
    (run / "checksums.json").unlink()
    assert client.fails("push", run, REPO).startswith(f"{run} has no checksums.json, so it cannot be verified")
    assert hub.repositories == {}
    hub.holds("ann/texts", {"a.txt": b"x"})
    said = client.fails("pull", "ann/texts", "-o", tmp_path / "out")
    assert said == "ann/texts was not pushed by qkscope: it has no qkscope.json; open or analyse it as a dataset"
    hub.holds("ann/evil", {HUB_MARK: b'{"kind": "run", "qkscope": "1", "about": "", "files": {"../x": {}}}'})
    said = client.fails("pull", "ann/evil", "-o", tmp_path / "out")
    assert said.startswith("qkscope.json of hf://datasets/ann/evil@main cannot be used (")
    said = client.fails("pull", run, "-o", tmp_path / "out")
    assert said.startswith(f"{run} is not on the Hub; give the owner/name of a pushed run or results")


# ---- results ---------------------------------------------------------------------------------------


def test_results_are_pushed_and_say_what_they_are_when_opened(client, run, tmp_path):
    client.works("push", run / "tables", "ann/tables")
    said = client.fails("analyze", "ann/tables", "-o", tmp_path / "out")
    assert said == (
        "hf://datasets/ann/tables@main holds tables (tables of run), not a run; fetch them with qkscope pull, or read "
        "them with datasets.load_dataset"
    )
    client.works("pull", "ann/tables", "-o", tmp_path / "pulled")
    assert tables_of(tmp_path / "pulled") == tables_of(run / "tables")
    assert read_folder(tmp_path / "pulled").models == ["run"]


LOAD = """
import sys, datasets
heads = datasets.load_dataset(sys.argv[1], "heads")["train"].to_pandas()
local = datasets.load_dataset("parquet", data_files=sys.argv[2])["train"].to_pandas()
assert heads.equals(local), "other numbers"
print(datasets.get_dataset_config_names(sys.argv[1]), len(heads))
"""


@pytest.mark.slow
@pytest.mark.usefixtures("pushed")
@pytest.mark.parametrize("kind", ["hub", "pulled"])
def test_the_datasets_package_loads_every_table_by_name(client, run, tmp_path, kind):
    pytest.importorskip("datasets")
    client.works("pull", REPO, "-o", tmp_path / "pulled")
    source = REPO if kind == "hub" else tmp_path / "pulled"
    command = [sys.executable, "-c", LOAD, source, run / "tables" / "heads.parquet"]
    done = subprocess.run(command, env=client.environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "'heads'" in done.stdout
    assert "'plasticity_pairs'" in done.stdout
