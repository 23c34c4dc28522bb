"""Whatever happens to a stored checkpoint ends in one clear line, never in wrong values or a fresh start."""

import json

import numpy as np
import pytest

from ms_zero.checkpoint import Shard, latest, open_checkpoint, prune
from ms_zero.errors import UserError

SHARD = Shard.whole("model.wte.weight", (64,), "float32")


def put(world, root, step, value=0.0):
    values = np.full(64, value, np.float32)
    halves = [Shard.flat(SHARD.name, (64,), "float32", a, a + 32) for a in (0, 32)]
    shards = [[(half, values[half.flat_start : half.flat_stop])] for half in halves]
    return world(2).save(root, step, shards, {"step": step, "value": value})[0]


def a_file(path, rank):
    return next(path.glob(f"rank-{rank:05d}-*.safetensors"))


def test_a_cut_file_names_file_and_tensor(tmp_path, world):
    path = put(world, tmp_path, 1)
    file = a_file(path, 1)
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UserError, match=rf"^{file}: has {size - 1} bytes of {size}; it holds tensor model"):
        open_checkpoint(path)


def test_a_missing_file_names_file_and_tensor(tmp_path, world):
    path = put(world, tmp_path, 1)
    file = a_file(path, 0)
    file.unlink()
    with pytest.raises(UserError, match=rf"^{file}: cannot be opened: No such file.*tensor model\.wte"):
        open_checkpoint(path)


def test_a_file_that_shrinks_after_opening_is_noticed(tmp_path, world):
    path = put(world, tmp_path, 1)
    checkpoint, file = open_checkpoint(path), a_file(path, 1)
    checkpoint.read(SHARD)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UserError, match=rf"^tensor model\.wte\.weight: {file}: .*cut short"):
        checkpoint.read(SHARD)


def test_any_flipped_bit_of_a_tensor_file_is_noticed_or_harmless(tmp_path, world):
    """Header bytes included: either the read fails naming file and tensor, or the values are right."""
    path = put(world, tmp_path, 1, value=1.5)
    file = a_file(path, 1)
    whole = bytearray(file.read_bytes())
    noticed = 0
    for at in range(len(whole)):
        whole[at] ^= 1 << (at % 8)
        file.write_bytes(whole)
        try:
            values = open_checkpoint(path).read(SHARD)
        except UserError as error:
            assert str(file) in str(error) and SHARD.name in str(error) and "\n" not in str(error)
            noticed += 1
        else:
            assert np.array_equal(values, np.full(64, 1.5))
        whole[at] ^= 1 << (at % 8)
    assert noticed > 128  # all of the data and most of the header


def test_any_flipped_bit_of_the_manifest_is_noticed(tmp_path, world):
    path = put(world, tmp_path, 1)
    file = path / "manifest.json"
    whole = bytearray(file.read_bytes())
    for at in range(len(whole)):
        whole[at] ^= 1 << (at % 7)
        file.write_bytes(whole)
        with pytest.raises(UserError, match=rf"^{file}: [^\n]+$"):
            open_checkpoint(path)
        whole[at] ^= 1 << (at % 7)


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_an_unknown_version_is_refused_everywhere(tmp_path, world, version):
    put(world, tmp_path, 1)
    path = put(world, tmp_path, 2)
    document = json.loads((path / "manifest.json").read_text())
    document["version"] = version
    (path / "manifest.json").write_text(json.dumps(document))
    with pytest.raises(UserError, match=f"format version {version!r}, this ms_zero reads version 1"):
        open_checkpoint(path)
    with pytest.raises(UserError, match="format version"):
        latest(tmp_path)
    assert prune(tmp_path, 1) == [] and path.exists()


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", "null", '{"format": "torch"}', "\udcff", '{"content": NaN}', "[" * 99999]
)
def test_a_foreign_manifest_is_refused(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text, errors="surrogateescape")
    with pytest.raises(UserError, match=r"manifest\.json: [^\n]+$"):
        open_checkpoint(tmp_path)


def forge(path, change):
    """Change the manifest's content and give it the right checksum again."""
    from ms_zero.checkpoint import manifest

    file = path / "manifest.json"
    document = json.loads(file.read_text())
    change(document["content"])
    document["crc32"] = manifest._checksum(document["content"])
    file.write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["tensors"][SHARD.name]["shards"].pop(), "32 of 64 elements are stored"),
        (lambda c: c["tensors"][SHARD.name]["shards"][0].update(file="../../x"), "not a listed file"),
        (lambda c: c["files"].update({"/etc/passwd": 1}), "not a listed file"),
        (lambda c: c["tensors"][SHARD.name]["shards"][0].update(key="y"), "does not hold y"),
        (lambda c: c["tensors"][SHARD.name]["shards"][0].update(range=[0, 99]), "outside its box"),
        (lambda c: c["tensors"][SHARD.name]["shards"][0].update(range=[0, "x"]), "not as expected"),
        (lambda c: c["tensors"][SHARD.name]["shards"][0].update(crc32="x"), "not as expected"),
        (lambda c: c.pop("tensors"), "not as expected"),
    ],
)
def test_a_forged_manifest_is_refused(tmp_path, world, change, message):
    path = put(world, tmp_path, 1)
    forge(path, change)
    with pytest.raises(UserError, match=message):
        open_checkpoint(path).read(SHARD)


def test_a_path_that_is_no_checkpoint_says_what_to_use(tmp_path, world):
    with pytest.raises(UserError, match="nowhere: no such checkpoint directory"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(UserError, match="not a checkpoint"):
        open_checkpoint(tmp_path)
    put(world, tmp_path, 1)
    with pytest.raises(UserError, match=r"it holds checkpoints: did you mean .*/step-00000001\?"):
        open_checkpoint(tmp_path)


def test_latest_skips_damaged_ones_and_says_so(tmp_path, world):
    good = put(world, tmp_path, 1)
    a_file(put(world, tmp_path, 2), 0).unlink()
    (put(world, tmp_path, 3) / "manifest.json").write_text("{")
    (tmp_path / "step-00000009").mkdir()  # never committed
    skipped = []
    assert latest(tmp_path, skipped.append) == good
    assert len(skipped) == 2 and "step-00000002" in skipped[0] and "step-00000003" in skipped[1]


def test_only_damaged_checkpoints_never_look_like_a_fresh_start(tmp_path, world):
    assert latest(tmp_path / "nothing here") is None
    assert latest(tmp_path) is None
    a_file(put(world, tmp_path, 2), 0).unlink()
    with pytest.raises(UserError, match="no usable checkpoint, 1 damaged; step-00000002"):
        latest(tmp_path)


def test_latest_refuses_a_root_that_cannot_be_listed(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="checkpoint folder cannot be read: Not a directory"):
        latest(tmp_path / "file")


def test_latest_is_the_one_written_last_not_the_highest_step(tmp_path, world):
    for step in (10, 20, 30):
        put(world, tmp_path, step, value=1.0)
    back = put(world, tmp_path, 20, value=2.0)  # the run went back to step 10
    assert latest(tmp_path) == back
    assert open_checkpoint(back).state["value"] == 2.0


def test_prune_keeps_those_written_last(tmp_path, world):
    paths = [put(world, tmp_path, step) for step in (1, 2, 3, 4)]
    assert prune(tmp_path, 0) == []
    assert prune(tmp_path, 9) == []
    back = put(world, tmp_path, 2)
    assert prune(tmp_path, 2) == [paths[0], paths[2]]
    assert sorted(tmp_path.iterdir()) == [back, paths[3]]
    with pytest.raises(UserError, match=r"checkpoint\.keep is -1"):
        prune(tmp_path, -1)


def test_prune_never_counts_a_damaged_checkpoint_as_kept(tmp_path, world):
    good = put(world, tmp_path, 1)
    bad = put(world, tmp_path, 2)
    a_file(bad, 0).unlink()
    assert prune(tmp_path, 1) == []
    assert good.exists() and bad.exists()
    put(world, tmp_path, 3)
    assert prune(tmp_path, 1) == [good]


def test_an_interrupted_deletion_is_finished_by_the_next(tmp_path, world, monkeypatch):
    from ms_zero.checkpoint import directory

    for step in (1, 2):
        put(world, tmp_path, step)

    def fail(path):
        raise OSError(5, "I/O error", path)

    with monkeypatch.context() as patch:
        patch.setattr(directory.shutil, "rmtree", fail)
        with pytest.raises(UserError, match=r"old checkpoint cannot be deleted: I/O error"):
            prune(tmp_path, 1)
    assert latest(tmp_path) == tmp_path / "step-00000002"
    assert prune(tmp_path, 1) == []
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000002"]
