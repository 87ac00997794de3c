"""Text and batches: the same on every machine layout, and nothing held back leaks into training."""

from __future__ import annotations

import bz2
import gzip
import itertools
import json
import lzma
import os
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plain_loop_kit import plainly_trained
from typer.testing import CliRunner

from hyper_parallel import cli
from hyper_parallel.models import chat_template
from hyper_parallel.trainer.config import Config, DataConfig, OptimizerConfig, TrainConfig
from hyper_parallel.trainer.data import (
    IGNORED,
    VALID_EVERY,
    LoaderBatches,
    _mix,
    check_length,
    load_corpus,
    load_template,
    rank_part,
    samples,
    shuffled,
    valid_samples,
    windows_that_count,
)
from hyper_parallel.trainer.preflight import read_text
from hyper_parallel.trainer.trainer import train

TEXT = np.arange(5_000, dtype=np.int64).astype(np.uint8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twenty files that each hold one letter, in two folders, and one file that does not match."""
    for number in range(20):
        file = tmp_path / ("b" if number < 10 else "a") / f"{number:02}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(chr(ord("A") + number) * 50)
    (tmp_path / "a" / "notes.txt").write_text("z" * 50)
    return tmp_path


def test_files_are_read_in_sorted_order_and_split_whole(folder: Path) -> None:
    corpus = load_corpus(DataConfig(str(folder)))
    # a/10.py ... a/19.py, then b/00.py ... b/09.py; every tenth one is held back.
    assert bytes(corpus.train).decode() == "".join(letter * 50 for letter in "KLMNOPQRSABCDEFGHI")
    assert bytes(corpus.valid).decode() == "T" * 50 + "J" * 50
    assert corpus.documents == 20


def test_reading_stops_at_max_bytes(folder: Path) -> None:
    assert load_corpus(DataConfig(str(folder), max_bytes=501)).documents == 11


def test_a_pattern_chooses_files(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"found 1 file\(s\) that match '\*.txt'.*at least 10 are needed"):
        load_corpus(DataConfig(str(folder), pattern="*.txt"))


@pytest.mark.parametrize("pattern", ["*.py", "b/*.py"])
def test_files_are_those_that_the_pattern_finds_below_the_folder(folder: Path, pattern: str) -> None:
    (folder / "a" / "c.py").mkdir()  # comes before c.pyi, and is no file
    for name in ("a/c.py/b.py", "a/c.pyi", "a-0.py", "a.py", ".hidden.py"):
        (folder / name).write_text(name)
    (folder / "link.py").symlink_to(folder / "a.py")
    (folder / "linked").symlink_to(folder / "b", target_is_directory=True)
    (folder / "a" / "c.py" / "b").mkdir()
    (folder / "a" / "c.py" / "b" / "deep.py").write_text("deep")
    (folder / "lost.py").symlink_to(folder / "nowhere")
    found = [file for file in folder.rglob(pattern) if file.is_file()]
    texts = [file.read_text() for file in sorted(found, key=lambda file: file.relative_to(folder).parts)]
    corpus = load_corpus(DataConfig(str(folder), pattern=pattern))
    assert bytes(corpus.valid).decode() == "".join(texts[9::10])
    assert bytes(corpus.train).decode() == "".join(text for i, text in enumerate(texts) if i % 10 != 9)


def test_one_file_is_split_by_position(tmp_path: Path) -> None:
    file = tmp_path / "book.txt"
    file.write_bytes(bytes(TEXT[:100]))
    corpus = load_corpus(DataConfig(str(file)))
    assert np.array_equal(corpus.train, TEXT[:90])
    assert np.array_equal(corpus.valid, TEXT[90:100])


def test_a_missing_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"no text at '.*nowhere': no such file or folder\n  path: .*\n  try: another \[data\] path"
    ):
        load_corpus(DataConfig(str(tmp_path / "nowhere")))


def test_the_standard_library_is_python_text() -> None:
    corpus = load_corpus(DataConfig(max_bytes=600_000))
    assert corpus.documents >= VALID_EVERY
    assert 600_000 <= corpus.train.size + corpus.valid.size < 1_500_000
    for part in (corpus.train, corpus.valid):
        assert b"def " in bytes(part)
        assert b"import " in bytes(part)
    assert load_corpus(DataConfig(max_bytes=600_000)) is corpus, "ranks of one process share the text"


def test_the_hash_is_that_of_plain_integers() -> None:
    def oracle(index: int, seed: int) -> int:
        z = (index * 0x9E3779B97F4A7C15 + seed * 0xD1B54A32D192ED03 + 1) % 2**64
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    indices = [0, 1, 2, 1_000, 2**40]
    for seed in (0, 1, 2**70):
        assert _mix(np.array(indices, dtype=np.uint64), seed).tolist() == [oracle(i, seed) for i in indices]


@pytest.mark.parametrize("dp_size", [1, 2, 3, 4, 6, 12])
def test_every_number_of_ranks_reads_the_same_global_batch(dp_size: int) -> None:
    step, batch, seq = 3, 12, 7
    parts = [samples(TEXT, rank_part(step * batch, batch, rank, dp_size), seq, seed=5) for rank in range(dp_size)]
    inputs, targets = (torch.cat(column) for column in zip(*parts, strict=True))
    whole_inputs, whole_targets = samples(TEXT, range(36, 48), seq, seed=5)
    assert torch.equal(inputs, whole_inputs)
    assert torch.equal(targets, whole_targets)


def test_targets_are_the_next_bytes() -> None:
    inputs, targets = samples(TEXT, range(6), 9, seed=0)
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.shape == targets.shape == (6, 9)
    assert torch.equal((inputs + 1) % 256, targets), "the text counts upwards"


def plainly_shuffled(index: int, count: int, seed: int) -> int:
    """The twin of `shuffled`, for one sample and in plain integers."""

    def mix(value: int) -> int:
        return int(_mix(np.array([value % 2**64], dtype=np.uint64), seed)[0])

    epoch, place = divmod(index, count)
    half = next(bits for bits in range(1, 32) if 4**bits >= count)
    while True:
        left, right = divmod(place, 2**half)
        for number in range(6):
            left, right = right, left ^ (mix(right ^ mix(epoch * 6 + number)) % 2**half)
        place = left * 2**half + right
        if place < count:
            return place


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 16, 17, 1_000])
def test_the_order_is_that_of_plain_integers(count: int) -> None:
    for first, seed in [(0, 0), (3 * count - 2, 7), (2**40, 2**70)]:
        numbers = range(first, first + 5)
        places = shuffled(np.array(numbers, dtype=np.uint64), count, seed)
        assert places.tolist() == [plainly_shuffled(number, count, seed) for number in numbers]


def test_every_epoch_has_every_window_once_in_an_order_of_its_own() -> None:
    ramp, windows = (np.arange(513) // 2).astype(np.uint8), 256  # the value tells the window
    orders = [
        samples(ramp, range(epoch * windows, (epoch + 1) * windows), 2, seed)[0][:, 0].tolist()
        for seed in (0, 1)
        for epoch in range(3)
    ]
    assert all(sorted(order) == list(range(windows)) for order in orders)
    for one, other in itertools.combinations([list(range(windows)), *orders], 2):
        alike = sum(left == right for left, right in zip(one, other, strict=True))
        follow = set(itertools.pairwise(one)) & set(itertools.pairwise(other))
        assert alike < 10, "about one of them is in the same place"
        assert len(follow) < 10


def test_every_order_of_a_few_windows_comes_up() -> None:
    orders = shuffled(np.arange(4 * 2_400, dtype=np.uint64), 4, seed=0).reshape(-1, 4)
    counts = Counter(tuple(order) for order in orders.tolist())
    assert len(counts) == 24
    assert 60 < min(counts.values()) <= max(counts.values()) < 140, "about 100 each"


@pytest.mark.parametrize("ignored", [0.0, 0.25])
def test_targets_are_left_out_alike_however_many_ranks_there_are(ignored: float) -> None:
    inputs, targets = samples(TEXT, range(64), 50, seed=3, ignored=ignored)
    parts = [samples(TEXT, range(first, first + 16), 50, seed=3, ignored=ignored) for first in range(0, 64, 16)]
    assert torch.equal(torch.cat([part[1] for part in parts]), targets)
    share = (targets == IGNORED).float().mean().item()
    assert abs(share - ignored) < 0.03
    assert torch.equal(targets[targets != IGNORED], ((inputs + 1) % 256)[targets != IGNORED])


@pytest.mark.parametrize("dp_size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("count", [1, 6, 8])
@pytest.mark.parametrize("multiple", [1, 3])
def test_every_number_of_ranks_validates_on_the_same_samples(dp_size: int, count: int, multiple: int) -> None:
    parts = [valid_samples(TEXT, count, 10, rank, dp_size, multiple) for rank in range(dp_size)]
    lengths = {len(targets) for _, targets in parts}
    assert len(lengths) == 1, "each rank takes part in every forward"
    assert lengths.pop() % multiple == 0
    inputs, targets = (torch.cat(column) for column in zip(*parts, strict=True))
    counted = (targets != IGNORED).all(dim=1)
    assert counted.sum() == count
    assert (targets[~counted] == IGNORED).all()
    alone = valid_samples(TEXT, count, 10, 0, 1)
    assert torch.equal(inputs[counted], alone[0])
    assert torch.equal(targets[counted], alone[1])


def test_validation_reaches_from_the_first_to_the_last_byte() -> None:
    inputs, targets = valid_samples(TEXT, 8, 10, 0, 1)
    assert inputs[0, 0] == TEXT[0]
    assert targets[-1, -1] == TEXT[-1]


def test_text_that_is_too_short_is_refused() -> None:
    check_length(TEXT[:11], 10, "training")
    message = (
        r"the training part of the text: it has 10 bytes, but one .* takes seq_len \+ 1 = 11\n.*\n  try: a smaller"
    )
    with pytest.raises(ValueError, match=message):
        check_length(TEXT[:10], 10, "training")


CHAT = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    """A tokenizer of transformers, in a folder: bytes, and three special tokens."""
    return made_tokenizer(tmp_path)


def made_tokenizer(tmp_path: Path, joined: tuple[str, ...] = (), *, ends: bool = False) -> Any:
    """Make a tokenizer that may join a space and a letter, and write the end of a document itself."""
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    special = ["<|end|>", "<|user|>", "<|assistant|>"]
    space = "\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}"  # as ByteLevel has it
    joined = tuple(f"{space}{letter}" for letter in joined)
    words = {word: number for number, word in enumerate([*special, *sorted(alphabet), *joined])}
    plain = tokenizers.Tokenizer(tokenizers.models.BPE(words, [(each[0], each[1]) for each in joined]))
    plain.add_special_tokens(special)
    plain.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = tokenizers.decoders.ByteLevel()
    if ends:
        own = [("<|end|>", 0)]
        plain.post_processor = tokenizers.processors.TemplateProcessing(single="$A <|end|>", special_tokens=own)
    found = transformers.PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<|end|>")
    found.chat_template = CHAT
    found.save_pretrained(tmp_path / "tokenizer")
    return found


def lines(path: Path, record: Any) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for _ in range(VALID_EVERY)))
    return str(path)


def read(tokenizer: Any, data: DataConfig) -> tuple[str, str]:
    """The first record as it is read, and what of it counts."""
    ids = load_corpus(data).valid.astype(np.int64)
    return tokenizer.decode(np.where(ids < 0, -1 - ids, ids)), tokenizer.decode(ids[ids >= 0])


def test_what_the_assistant_says_counts(tokenizer: Any, tmp_path: Path) -> None:
    turns = [("user", "assistant"), ("assistant", "b"), ("user", "b"), ("assistant", "da")]
    path = lines(tmp_path / "x.jsonl", {"messages": [{"role": role, "content": text} for role, text in turns]})
    data = DataConfig(path, tokenizer=str(tmp_path / "tokenizer"))
    whole = "<|user|>assistant<|end|><|assistant|>b<|end|><|user|>b<|end|><|assistant|>da<|end|>"
    assert read(tokenizer, data) == (whole, "b<|end|>da<|end|>")
    assert read(tokenizer, DataConfig(path, tokenizer=data.tokenizer, mask_prompts=False)) == (whole, whole)
    with pytest.raises(ValueError, match="a conversation is written by a tokenizer's template"):
        load_corpus(DataConfig(path))


@pytest.mark.tier("test")
@pytest.mark.parametrize("said", ["d", "end", "|", ">", "", "<|end|>"])
def test_the_mark_that_ends_a_turn_counts_whatever_is_said(tokenizer: Any, tmp_path: Path, said: str) -> None:
    turns = [("user", "which one?"), ("assistant", said), ("user", "and now?"), ("assistant", "none")]
    path = lines(tmp_path / "x.jsonl", {"messages": [{"role": role, "content": text} for role, text in turns]})
    whole, counted = read(tokenizer, DataConfig(path, tokenizer=str(tmp_path / "tokenizer")))
    first = f"<|user|>which one?<|end|><|assistant|>{said}<|end|>"
    assert whole == f"{first}<|user|>and now?<|end|><|assistant|>none<|end|>"
    assert counted == f"{said}<|end|>none<|end|>"


@pytest.mark.tier("test")
@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ 'x' * 3800000000 }}", "its template fails: it takes more than 256 MiB"),
        (
            "{% set text = namespace(s='x') %}{% for i in range(40) %}{% set text.s = text.s ~ text.s %}{% endfor %}",
            "its template fails: it takes more than 256 MiB",
        ),
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "its template fails: it ended, most likely as it takes more than 1 s of CPU",
        ),
        ("{{ raise_exception('roles must alternate') }}", "its template fails: roles must alternate"),
    ],
)
def test_a_template_that_takes_all_memory_or_time_is_stopped(
    template: str, message: str, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template, "MOST_MEMORY", 2**28)
    monkeypatch.setattr(chat_template, "MOST_SECONDS", 1)
    tokenizer.chat_template = "{% if messages|length > 1 %}" + template + "{% endif %}" + CHAT
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    said: Any = [{"role": role, "content": "é"} for role in ("user", "assistant")]
    data = DataConfig(lines(tmp_path / "chat.jsonl", {"messages": said}), tokenizer=str(tmp_path / "tokenizer"))
    with pytest.raises(ValueError, match=message):
        load_corpus(data)
    rendered = load_template(str(tmp_path / "tokenizer")).render(said[:1], add_generation_prompt=True)
    assert rendered == "<|user|>é<|end|><|assistant|>", "the one that was stopped is not missed"


@pytest.mark.tier("test")
def test_modules_beside_a_template_are_not_imported(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who trains inside of a folder has its modules at the front of Python's path."""
    for name in ("json", "tokenizers", "transformers", "jinja2"):
        (tmp_path / f"{name}.py").write_text("open('ran', 'w').close()")
    monkeypatch.chdir(tmp_path)
    assert chat_template.ChatTemplate(tokenizer).render([{"role": "user", "content": "a"}]) == "<|user|>a<|end|>"
    assert not (tmp_path / "ran").exists()


def test_completions_count_and_documents_end(tokenizer: Any, tmp_path: Path) -> None:
    folder = str(tmp_path / "tokenizer")
    path = lines(tmp_path / "x.jsonl", {"prompt": "1 + é = ", "completion": "3"})
    assert read(tokenizer, DataConfig(path, tokenizer=folder)) == ("1 + é = 3<|end|>", "3<|end|>")
    bytes_of_it = load_corpus(DataConfig(path)).valid
    assert [t for t in bytes_of_it if t >= 0] == [ord("3")]
    assert bytes((-1 - bytes_of_it[bytes_of_it < 0]).tolist()).decode() == "1 + é = "
    path = lines(tmp_path / "y.jsonl", {"text": "one<|end|>"})
    assert read(tokenizer, DataConfig(path, tokenizer=folder)) == ("one<|end|>", "one<|end|>")
    (tmp_path / "text").write_text("abc " * 50)
    corpus = load_corpus(DataConfig(str(tmp_path / "text"), tokenizer=folder))
    assert tokenizer.decode(np.concatenate([corpus.train, corpus.valid])) == "abc " * 50 + "<|end|>"
    assert corpus.largest() < len(tokenizer)


@pytest.mark.parametrize("ends", [False, True])
def test_a_token_that_begins_in_the_prompt_counts_with_its_completion(tmp_path: Path, ends: bool) -> None:
    """Or an answer of one word would never be a target; and a tokenizer says of an end that it adds that it is at 0."""
    words = made_tokenizer(tmp_path, ("P",), ends=ends)
    path = lines(tmp_path / "x.jsonl", {"prompt": "The capital is ", "completion": "Paris"})
    data = DataConfig(path, tokenizer=str(tmp_path / "tokenizer"))
    assert read(words, data) == ("The capital is Paris<|end|>", " Paris<|end|>")


def test_ignored_prompts_are_read_and_are_no_targets() -> None:
    inputs, targets = samples(np.array([5, -1 - 6, -1 - 7, 8, 9], dtype=np.int32), range(1), 4, seed=0)
    assert inputs.tolist() == [[5, 6, 7, 8]]
    assert targets.tolist() == [[IGNORED, IGNORED, 8, 9]]


def test_parquet_files_hold_the_same_records(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = [f"text {number};" for number in range(12)]
    parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "x.parquet")
    (tmp_path / "x.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    for suffix in ("parquet", "jsonl"):
        corpus = load_corpus(DataConfig(str(tmp_path / f"x.{suffix}")))
        assert bytes(corpus.valid) == texts[9].encode()
        assert bytes(corpus.train).decode() == "".join(texts[:9] + texts[10:])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot read record 1 of .*: it is no JSON"),
        pytest.param("[" * 100_000, "cannot read record 1 of .*: it is no JSON", id="brackets"),
        ('{"body": "x"}', "it has no text in 'text'\n  keys: body"),
        ('{"completion": "x"}', "it has no text in 'prompt' and 'completion'"),
        ("[1]", "it has no text in 'text'\n  keys: list"),
        ('{"messages": [{"role": "user"}]}', "messages are objects with a role and content"),
        ('{"messages": "hello"}', "messages are objects with a role and content"),
        ('{"text": "x"}', r"found 1 record\(s\) in .*at least 10 are needed"),
    ],
)
def test_records_without_text_are_named(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(content)
    with pytest.raises(ValueError, match=message):
        load_corpus(DataConfig(str(tmp_path / "x.jsonl")))


@pytest.mark.parametrize("module", [gzip, bz2, lzma, zipfile])
def test_compressed_files_are_named(module: Any, tmp_path: Path) -> None:
    for at in range(10):
        (tmp_path / f"{at}.txt").write_text("text " * 20)
    packed = tmp_path / "9.txt"
    if module is zipfile:
        with zipfile.ZipFile(packed, "w") as archive:
            archive.write(tmp_path / "8.txt")
    else:
        packed.write_bytes(module.compress(b"text " * 20))
    message = r"cannot read .*9.txt: it is compressed\n  its first bytes: b.*\n  try: "
    for place in (tmp_path, packed):
        with pytest.raises(ValueError, match=message):
            load_corpus(DataConfig(str(place), pattern="*.txt"))
    packed.write_text("BZh is how some text begins. " * 20)
    assert load_corpus(DataConfig(str(packed))).documents == 1


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_text_that_is_not_utf_8_is_named(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "x.txt").write_text("\ufeff" + "some text " * 50, encoding=encoding)
    with pytest.raises(ValueError, match=r"cannot read .*x.txt: it is UTF-16\n.*\n  try: iconv"):
        load_corpus(DataConfig(str(tmp_path / "x.txt")))


@pytest.mark.parametrize("name", ["x.txt", "x.jsonl"])
def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match="it is neither a file nor a folder"):
        load_corpus(DataConfig(str(tmp_path / name)))


def test_files_of_another_kind_are_named(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "x.parquet").write_bytes(b"text")
    with pytest.raises(ValueError, match=r"cannot read .*x.parquet: it is no parquet file\n.*\n  try: "):
        load_corpus(DataConfig(str(tmp_path / "x.parquet")))
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "\xff"}')
    with pytest.raises(ValueError, match=r"cannot read record 1 of .*x.jsonl: it is no JSON"):
        load_corpus(DataConfig(str(tmp_path / "x.jsonl")))


def test_a_tokenizer_that_is_not_there_is_named(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    path = lines(tmp_path / "x.jsonl", {"text": "x"})
    (tmp_path / "empty").mkdir()
    for folder, message in (("nowhere", "there is no such folder"), ("empty", "transformers cannot load it")):
        with pytest.raises(ValueError, match=rf"cannot load the tokenizer .*{folder}: {message}"):
            load_corpus(DataConfig(path, tokenizer=str(tmp_path / folder)))


@pytest.mark.tier("full", each=2)
@pytest.mark.sim
@pytest.mark.parametrize("kind", ["Qwen3", "Llama"])
def test_a_model_of_transformers_is_trained_on_conversations_and_answers(
    tokenizer: Any, tmp_path: Path, kind: str
) -> None:
    """From a folder of transformers to one that it generates text from, by way of the commands: tokenizer included."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "eos_token_id": tokenizer.eos_token_id}
    torch.manual_seed(0)
    shape = getattr(transformers, f"{kind}Config")(**sizes, **heads, tie_word_embeddings=kind == "Qwen3")
    theirs = getattr(transformers, f"{kind}ForCausalLM")(shape)
    start, run = str(tmp_path / "tokenizer"), str(tmp_path / "run")
    theirs.save_pretrained(start)
    asked = [{"role": "user", "content": "who?"}]
    path = lines(tmp_path / "x.jsonl", {"messages": [*asked, {"role": "assistant", "content": "me"}]})
    config = Config(
        data=DataConfig(path, tokenizer=start),
        train=TrainConfig(steps=24, batch_size=4, seq_len=8, device="cpu"),
        optimizer=OptimizerConfig(lr=1e-2, schedule="constant"),
    )
    same = ["--batch-size", "4", "--seq-len", "8", "--lr", "1e-2", "--lr-schedule", "constant"]
    same += ["--start-from", start, "--data", path, "--checkpoint-dir", run, "--log-file", str(tmp_path / "log")]

    def command(*words: str) -> str:
        result = CliRunner().invoke(cli.app, words)
        assert result.exit_code == 0, result.output
        return " ".join(result.output.split())

    said = command("train", "--sim", "4", "--tp", "2", "--steps", "8", *same)
    assert "90 tokens + 10 held back; 27 count as targets" in said
    said = command("train", "--sim", "2", "--pp", "2", "--accumulate", "2", "--steps", "24", *same)
    assert "goes on from step 8" in said
    losses = [json.loads(line)["loss"] for line in (tmp_path / "log").read_text().splitlines()]
    torch.testing.assert_close(losses, plainly_trained(theirs, config), rtol=1e-4, atol=1e-6)

    wrong = CliRunner().invoke(cli.app, ["train", *same, "--vocab-size", "100"])
    assert wrong.exit_code == 2
    assert "its model has another vocab_size than the run's" in wrong.output
    wrong = CliRunner().invoke(cli.app, ["export", str(tmp_path / "nowhere"), str(tmp_path / "out")])
    assert "there is no such folder" in wrong.output

    out = tmp_path / "out"
    command("export", run, str(out))
    words = transformers.AutoTokenizer.from_pretrained(out)
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    for name, param in model.named_parameters():
        torch.testing.assert_close(param, theirs.get_parameter(name), rtol=1e-3, atol=1e-4)
    question = words.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**question, max_new_tokens=20, do_sample=False, pad_token_id=0)[0]
    assert words.decode(answer) == "<|user|>who?<|end|><|assistant|>me<|end|>"


@pytest.mark.tier("test")
def test_what_a_text_and_a_model_do_not_share_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    folder = str(tmp_path / "tokenizer")
    path = lines(tmp_path / "x.jsonl", {"prompt": "1 + 2 = " * 4, "completion": "3"})
    config = Config(data=DataConfig(path, tokenizer=folder), train=TrainConfig(seq_len=8, device="cpu"))
    with pytest.raises(ValueError, match=r"the text has token [0-9]+, and model.vocab_size is 50"):
        read_text(config.with_changes("model", {"vocab_size": 50}))
    path = lines(tmp_path / "y.jsonl", {"messages": [{"role": "user", "content": "does anybody answer?"}]})
    with pytest.raises(ValueError, match=r"none of its tokens counts as a target\n  mask_prompts: True"):
        read_text(config.with_changes("data", {"path": path}))
    assert read_text(config.with_changes("data", {"path": path, "mask_prompts": False})).targets() > 0
    records = [{"prompt": "1 + 2 = " * 4, "completion": "" if number == 9 else "3"} for number in range(10)]
    path = tmp_path / "z.jsonl"
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    with pytest.raises(ValueError, match=r"cannot validate on the text: none of its held-back tokens counts"):
        read_text(Config(data=DataConfig(str(path)), train=TrainConfig(seq_len=8, device="cpu")))


def test_windows_in_the_middle_of_a_prompt_are_left_out(tmp_path: Path) -> None:
    path = lines(tmp_path / "x.jsonl", {"prompt": "p" * 40, "completion": "c" * 4})
    data = DataConfig(path)
    corpus, seq_len = load_corpus(data), 8
    assert corpus.train.size == 9 * 44
    found = windows_that_count(corpus.train, seq_len)
    everything = range((corpus.train.size - 1) // seq_len)
    with_targets = [n for n in everything if b"c" in bytes(corpus.train[n * 8 + 1 : n * 8 + 9].clip(0).tolist())]
    assert found.tolist() == with_targets
    assert 9 <= len(found) < len(everything) / 2
    train_on = samples(corpus.train, range(2 * len(found)), seq_len, 0, windows=found)
    assert ((train_on[1] != IGNORED).any(dim=1)).all()
    validated = torch.cat([valid_samples(corpus.train, 7, seq_len, rank, 3)[1] for rank in range(3)])
    assert (validated != IGNORED).any(dim=1).tolist() == [True] * 7 + [False] * 2
    parts = [corpus.train[n * 8 : n * 8 + 8] for n in found]
    windows = [abs(part + (part < 0)).tolist() for part in parts]
    assert sorted(train_on[0][: len(found)].tolist()) == sorted(windows), "an epoch has each of them once"
    assert valid_samples(corpus.train, len(found), seq_len, 0, 1)[0].tolist() == windows, "up to the last"
    plain = load_corpus(DataConfig(max_bytes=200_000)).train
    assert windows_that_count(plain, 100).size == (plain.size - 1) // 100
    config = Config(data=data, train=TrainConfig(steps=2, batch_size=2, seq_len=8, device="cpu"))
    assert all(step.tokens > 0 for step in train(config).steps)


def test_a_folder_that_the_pattern_leaves_out_says_what_there_is(tmp_path: Path) -> None:
    lines(tmp_path / "x.jsonl", {"text": "x"})
    with pytest.raises(ValueError, match=r"found 0 file\(s\).*\n  path: .*\n  try: \[data\] pattern = '\*.jsonl'"):
        load_corpus(DataConfig(str(tmp_path)))
    corpus = load_corpus(DataConfig(str(tmp_path), pattern="*.jsonl", max_bytes=10))
    assert bytes(corpus.train) == b"x" * 9
    assert corpus.is_cut
    assert not load_corpus(DataConfig(str(tmp_path), pattern="*.jsonl")).is_cut


def test_batches_of_a_loader() -> None:
    ids = torch.arange(6).view(2, 3)
    pairs = LoaderBatches(lambda: [(ids, ids + 1)], 2, 3, 7)
    for _ in range(2):  # it begins anew
        assert [x.tolist() for x in pairs.next()] == [ids.tolist(), (ids + 1).tolist()]
    labels = torch.tensor([[-100, 1, 2], [3, 4, 5]])
    padded = {"input_ids": ids, "labels": labels, "attention_mask": torch.tensor([[1, 1, 0], [1, 1, 1]])}
    inputs, targets = LoaderBatches(lambda: [padded], 2, 3, 7).next()
    assert inputs.tolist() == ids.tolist()
    assert targets.tolist() == [[1, 2, IGNORED], [4, 5, IGNORED]]
    del padded["labels"]
    _, targets = LoaderBatches(lambda: [padded], 2, 3, 7).next()
    assert targets.tolist() == [[1, IGNORED, IGNORED], [4, 5, IGNORED]], "padding is no text"
    padded["labels"] = labels
    for batch, message in (
        ((ids[:1], ids[:1]), "another form\n.*\n  try: .*; drop_last=True of a DataLoader"),
        ((ids.float(), ids), "another form"),
        ((ids, ids, ids), "a pair"),
        ((ids, ids + 2), "it has token 7, and model.vocab_size is 7"),
        ((ids - 1, ids), "it has token -1, and"),
        ({**padded, "attention_mask": torch.tensor([[0, 1, 1], [1, 1, 1]])}, "padded on the left"),
    ):
        with pytest.raises(ValueError, match=message):
            LoaderBatches(lambda batch=batch: [batch], 2, 3, 7).next()
    with pytest.raises(ValueError, match="has no batch"):
        LoaderBatches(list, 2, 3, 7).next()
    with pytest.raises(TypeError, match="has no batches"):
        LoaderBatches(lambda: 5, 2, 3, 7)  # type: ignore[arg-type, return-value]


def test_no_more_is_read_of_a_file_than_may_be(tmp_path: Path) -> None:
    """A text file may be larger than memory; these have a terabyte, of which a disk keeps nothing."""
    (tmp_path / "texts").mkdir()
    for place in ("one.txt", "texts/0.txt"):
        with (tmp_path / place).open("wb") as file:
            file.write(b"a text that is long enough to be cut")
            file.truncate(2**40)
    for number in range(1, 10):
        (tmp_path / "texts" / f"{number}.txt").write_text("another text")
    whole = load_corpus(DataConfig(path=str(tmp_path / "one.txt"), max_bytes=20))
    assert bytes([*whole.train, *whole.valid]) == b"a text that is long "
    assert whole.is_cut
    with pytest.raises(ValueError, match="found 1 file"):  # which has as many bytes as may be read
        load_corpus(DataConfig(path=str(tmp_path / "texts"), pattern="*.txt", max_bytes=20))


def test_half_a_surrogate_pair_of_a_record_is_replaced(tmp_path: Path) -> None:
    text = '{"text": "half a pair \\ud83d, and a whole one \\ud83d\\ude00"}'
    (tmp_path / "records.jsonl").write_text("\n".join([text] * 10))
    corpus = load_corpus(DataConfig(path=str(tmp_path / "records.jsonl")))
    assert bytes(corpus.valid) == "half a pair \N{REPLACEMENT CHARACTER}, and a whole one \N{GRINNING FACE}".encode()


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path, message in (
        ("~nobody-of-that-name/text", "no text at '.*~nobody-of-that-name/text'"),
        (str(tmp_path / "loop"), "(cannot read the|no) text at '.*loop'"),
    ):
        with pytest.raises(ValueError, match=message):
            load_corpus(DataConfig(path=path))
    if os.path.exists("/proc/self/mem"):
        with pytest.raises(ValueError, match=r"cannot read the text at .*: a file fails\n  seen: .*\n  try"):
            load_corpus(DataConfig(path="/proc/self/mem"))
