"""Text becomes samples in an order that seed and number alone decide."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest
import torch

from infinity.cli.training.data import ByteTokens, Samples, Stream, TokenizedFiles, find_files, hold_out
from infinity.errors import ConfigError


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    (tmp_path / "b.txt").write_bytes(bytes(range(100)))
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.py").write_bytes(bytes(range(100, 200)))
    (tmp_path / "empty.txt").touch()
    (tmp_path / "picture.png").write_bytes(b"no text")
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "installed.py").write_bytes(b"somebody else's")
    return tmp_path


def samples_of(corpus: Path, length: int = 20, seed: int = 3) -> Samples:
    return Samples(Stream(ByteTokens(find_files([corpus])), length), seed)


def ids(samples: Samples, first: int, size: int) -> torch.Tensor:
    batch = samples.batch(first, size)
    assert torch.equal(batch["input_ids"], batch["labels"])
    return batch["input_ids"]


def test_files_are_found_in_a_fixed_order_without_installed_packages(corpus) -> None:
    assert [path.name for path in find_files([corpus])] == ["b.txt", "a.py"]


def test_a_directory_that_cannot_be_read_is_not_left_out(corpus, monkeypatch) -> None:
    def walk(path: Path, onerror: Callable[[OSError], None]) -> None:
        onerror(PermissionError(errno.EACCES, "Permission denied", str(path / "sub")))

    monkeypatch.setattr("os.walk", walk)
    with pytest.raises(ConfigError, match=r"--data .*/sub cannot be read: Permission denied"):
        find_files([corpus])


def test_reads_cross_from_file_to_file(corpus) -> None:
    tokens = ByteTokens(find_files([corpus]))
    assert len(tokens) == 200
    assert tokens.read(90, 20).tolist() == list(range(90, 110))
    assert tokens.read(100, 5).tolist() == list(range(100, 105))


def test_every_sample_comes_once_an_epoch_and_epochs_differ(corpus) -> None:
    samples = samples_of(corpus)
    first, second = ids(samples, 0, 10), ids(samples, 10, 10)
    assert sorted(first[:, 0].tolist()) == list(range(0, 200, 20))
    assert sorted(second[:, 0].tolist()) == sorted(first[:, 0].tolist())
    assert first.tolist() != second.tolist()


def test_a_batch_depends_on_its_number_alone(corpus) -> None:
    samples = samples_of(corpus)
    again = samples_of(corpus)
    samples.batch(0, 7)
    assert torch.equal(ids(samples, 13, 4), ids(again, 13, 4))
    assert not torch.equal(ids(samples, 0, 10), ids(samples_of(corpus, seed=4), 0, 10))


def test_what_is_held_out_is_not_trained_on(corpus) -> None:
    source = Stream(ByteTokens(find_files([corpus])), 10)
    chosen, held_out = hold_out(source, 0.25, seed=1)
    assert sorted([*chosen.tolist(), *held_out.tolist()]) == list(range(20))
    assert len(held_out) == 5
    samples = Samples(source, 1, chosen)
    seen = ids(samples, 0, 15)[:, 0]
    assert sorted(seen.tolist()) == [10 * number for number in chosen.tolist()]
    assert samples.fingerprint() == {**Samples(source, 1).fingerprint(), **samples.fingerprint()}
    assert samples.fingerprint()["samples"] == 15
    assert [part.tolist() for part in hold_out(source, 0.25, seed=1)] == [chosen.tolist(), held_out.tolist()]
    for share in (0.01, 0.99):
        with pytest.raises(ConfigError, match="of 20 samples holds out"):
            hold_out(source, share, seed=1)


def test_a_temporary_directory_that_is_full_is_named(corpus, monkeypatch) -> None:
    def full() -> IO[bytes]:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    with pytest.raises(ConfigError, match=r"in .*No space left on device; free some space, or set TMPDIR"):
        TokenizedFiles(find_files([corpus]), [])


def test_too_little_text_is_refused(corpus) -> None:
    with pytest.raises(ConfigError, match="fewer than one sample of --seq-len 500"):
        samples_of(corpus, length=500)
    with pytest.raises(ConfigError, match=r"--eval-data \S*/empty.txt: there is no text"):
        find_files([corpus / "empty.txt"], "--eval-data")


class WordLengths:
    """A tokenizer: one token a word, its length."""

    def __len__(self) -> int:
        return 1000

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": [len(word) for word in text.split()]}


def test_files_are_tokenized_line_after_line_in_bounded_pieces(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("infinity.cli.training.data._PIECE_CHARS", 5)
    words = [f"{'w' * (1 + n % 9)}" for n in range(500)]
    path = tmp_path / "words.txt"
    path.write_text("\n".join(words))
    tokens = TokenizedFiles([path, path], WordLengths())
    assert len(tokens) == 1000
    assert tokens.read(0, 1000).tolist() == [len(word) for word in words] * 2


def test_text_without_tokens_is_refused_by_name(tmp_path) -> None:
    path = tmp_path / "blank.txt"
    path.write_text("   \n  ")
    with pytest.raises(ConfigError, match=r"finds no token in --data \(.*blank\.txt\)"):
        TokenizedFiles([path], WordLengths())


def test_a_file_that_went_away_is_named(corpus) -> None:
    files = find_files([corpus / "b.txt"])
    tokens = ByteTokens(files)
    (corpus / "b.txt").unlink()
    with pytest.raises(ConfigError, match=r"b\.txt cannot be read: No such file"):
        tokens.read(0, 5)
    with pytest.raises(ConfigError, match=r"b\.txt cannot be read: No such file"):
        TokenizedFiles(files, WordLengths())


def test_the_fingerprint_tells_data_and_order_apart(corpus) -> None:
    def fingerprint(length: int = 20, seed: int = 3) -> dict[str, int]:
        return samples_of(corpus, length, seed).fingerprint()

    first = fingerprint()
    assert first == fingerprint()
    assert first != fingerprint(length=10)
    assert first != fingerprint(seed=4)
    (corpus / "sub" / "a.py").write_bytes(bytes([*range(100, 199), 0]))  # the last token
    assert first != fingerprint()
