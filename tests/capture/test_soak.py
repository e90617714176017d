"""A few hundred short documents: files that are open and parts on disk stay as few as at the beginning."""

from __future__ import annotations

from benchmarks.soak import soak


def test_open_files_and_parts_stay_bounded(tmp_path):
    samples = soak(320, tmp_path / "run", every=8)  # 40 shards of 8 documents
    assert [at.documents for at in samples] == list(range(8, 321, 8))
    assert len({at.open_files for at in samples[1:]}) == 1
    # A sample is taken before its shard is saved: one part per bit of the number of shards before it.
    assert [at.parts for at in samples] == [shards.bit_count() for shards in range(40)]
    assert (tmp_path / "run" / "run.json").exists()
    assert not (tmp_path / "run" / "parts").exists()
