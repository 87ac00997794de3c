"""Clients of this suite: whose they are, how they are started, and on what data."""

from __future__ import annotations

import array
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CLIENTS", "SOURCES", "Client", "Source"]

SCRIPTS = Path(__file__).with_name("scripts")


@dataclass(frozen=True)
class Source:
    """A repository that no registry has, at the commit that is run.

    Attributes:
        address: where it is cloned from, unless there is a copy.
        commit: the commit.
        version: how the page calls it.
        folders: the parts of it that clients need.
    """

    address: str
    commit: str
    version: str
    folders: tuple[str, ...] = (".",)


@dataclass(frozen=True)
class Client:
    """A program that was written for torchrun, by others or over others' libraries.

    Attributes:
        name: by which it is chosen.
        of: a distribution of `requirements.txt`, or a name of `SOURCES`: whose version the page shows.
        runs: what is started, one after the other in one folder: number of ranks, and the command after that.
        folder: the folder of the source in which it runs.
        data: writes what it reads into that folder.
        estimate: whether `python -m sim estimate` is asked for its steps on 8 GPUs, too.
        edits: what is changed in the source: file, text, and the text that takes its place.
        changes: the same in words, for the page.
        map_device: whether it asks for CUDA devices, in whose place it gets the CPU.
        options: more options of `python -m sim run`.
        tolerance: the largest relative difference of what is compared; 0 for bit for bit.
        like: the client that prints the same losses with torch's engine.
        alone: what one process runs that has no other rank, and prints the same losses.
        saved: files that it writes, whose tensors are compared.
        note: what the page says beside it.
    """

    name: str
    of: str
    runs: tuple[tuple[int, str], ...]
    folder: str = "."
    data: Callable[[Path], None] = lambda folder: None
    edits: tuple[tuple[str, str, str], ...] = ()
    changes: str = "nothing"
    map_device: bool = False
    estimate: bool = False
    options: tuple[str, ...] = ()
    tolerance: float = 1e-5
    like: str = ""
    alone: str = ""
    saved: tuple[str, ...] = ()
    note: str = ""


SOURCES = {
    "torchtitan": Source(
        "https://github.com/pytorch/torchtitan",
        "73a0e6979dd10b6b1904098eb3c8f62c18ab87ce",
        "v0.2.2",
        ("torchtitan", "tests/assets/tokenizer"),
    ),
    "examples": Source(
        "https://github.com/pytorch/examples", "77f55b912142e11fcfdf5b530231fb9c52f181e8", "2025-08", ("distributed",)
    ),
    "nanoGPT": Source("https://github.com/karpathy/nanoGPT", "3adf61e154c3fe3fca428ad6bc3818b27a3b8291", "2025-11"),
    "picotron": Source(
        "https://github.com/huggingface/picotron", "59714b1bf25541dbeb6f5a721ed15f6d0768e786", "2025-08"
    ),
}


def text(words: int) -> str:
    """Return words drawn from a few, always the same."""
    draw = random.Random(0)
    return " ".join(draw.choice(("a", "mesh", "of", "ranks", "holds", "shards", "that", "sum")) for _ in range(words))


def characters(folder: Path) -> None:
    (folder / "tiny.txt").write_text(text(400))


def tokens(folder: Path) -> None:
    """Write nanoGPT's data: two files of 16-bit tokens, and the size of the vocabulary."""
    import pickle

    there = folder / "data" / "tiny"
    there.mkdir(parents=True)
    for name in ("train", "val"):
        (there / f"{name}.bin").write_bytes(array.array("H", list(text(2000).encode())).tobytes())
    (there / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 128}))


def c4(folder: Path) -> None:
    """Write what torchtitan reads for its dataset `c4_test`."""
    there = folder / "tests" / "assets" / "c4_test"
    there.mkdir(parents=True)
    (there / "data.json").write_text("\n".join(json.dumps({"text": text(200)}) for _ in range(64)))


def small_language(folder: Path) -> None:
    """Write what picotron reads: texts, a tokenizer, a configuration, weights; and what it imports without using it."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    rows = [json.dumps({"text": text(33)}) for _ in range(32)]
    (folder / "texts").mkdir()
    (folder / "texts" / "train.jsonl").write_text("\n".join(rows))
    words = {word: number for number, word in enumerate(("[UNK]", *sorted(set(text(400).split()))))}
    splitter = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    splitter.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=splitter, unk_token="[UNK]").save_pretrained(folder / "small")
    sizes = {"vocab_size": 16, "hidden_size": 32, "intermediate_size": 64}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, **heads)
    config.save_pretrained(folder / "small")
    config.save_pretrained(folder / "hf_model" / "small")
    LlamaForCausalLM(config).save_pretrained(folder / "hf_model_safetensors")
    for module in ("flash_attn_interface", "layers/rotary", "ops/triton/layer_norm"):
        (folder / "flash_attn" / module).parent.mkdir(parents=True, exist_ok=True)
        (folder / "flash_attn" / f"{module}.py").write_text(
            "flash_attn_func = apply_rotary_emb = layer_norm_fn = None\n"
        )
    (folder / "wandb.py").touch()
    asked = {
        "distributed": {"tp_size": 2, "cp_size": 1, "pp_size": 1, "dp_size": 2, "pp_engine": "1f1b", "use_cpu": True},
        "model": {"name": "small", "use_fused_adam": False, **heads},
        "training": {
            "seed": 42,
            "learning_rate": 1e-2,
            "total_train_steps": 4,
            "seq_length": 16,
            "micro_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "max_tokens": None,
        },
        "dataset": {"name": "texts", "num_workers": 0, "num_proc": None},
        "checkpoint": {"save_dir": "saved", "save_frequency": 1000, "load_path": ""},
        "logging": {"use_wandb": False},
        "environment": {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "FLASH_ATTEN": "0"},
    }
    (folder / "config.json").write_text(json.dumps(asked))


def script(line: str) -> str:
    """Return the command of a script of this folder."""
    return f"{SCRIPTS}/{line}"


TENSOR_PARALLEL = "distributed/tensor_parallelism"
NANO_GPT = (
    "train.py --dataset=tiny --compile=False --dtype=float32 --backend=gloo --eval_interval=3 --eval_iters=2 "
    "--max_iters=6 --batch_size=2 --block_size=16 --n_layer=2 --n_head=2 --n_embd=32 --gradient_accumulation_steps=4 "
    "--learning_rate=1e-2 --warmup_iters=1"
)
MIN_GPT = (
    "main.py data_config.path=tiny.txt data_config.block_size=16 data_config.truncate=0.2 gpt_config.n_layer=2 "
    "gpt_config.n_head=2 gpt_config.n_embd=32 trainer_config.max_epochs=1 trainer_config.batch_size=16 "
    "trainer_config.data_loader_workers=0 trainer_config.save_every=1 trainer_config.use_amp=False"
)

TORCHTITAN = (
    "-m torchtitan.train --job.config_file torchtitan/models/llama3/train_configs/debug_model.toml "
    "--metrics.disable_color_printing --training.steps 4 --training.seq_len 64 --training.local_batch_size 2 "
    "--debug.seed 1 "
)
# Triton is a gigabyte of compilers for GPUs; the kernels are those of experts.
NO_TRITON = (
    (
        "torchtitan/models/moe/kernels.py",
        "import triton\nimport triton.language as tl",
        "from unittest.mock import MagicMock\ntriton = tl = MagicMock()",
    ),
)
OUR_ENGINE = (
    "torchtitan/models/llama3/infra/parallelize.py",
    "from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard, MixedPrecisionPolicy",
    "from hyper_parallel import fully_shard\nfrom torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy",
)


def fsdp2(
    library: str,
    of: str,
    alone: tuple[str, ...] = ("torch", "hyper_parallel"),
    saved: tuple[str, ...] = (),
    notes: tuple[str, str] = ("", ""),
    ranks: int = 2,
) -> tuple[Client, ...]:
    """Return a client of both engines: torch's `fully_shard`, and ours by another import.

    Args:
        library: what takes part in the loop.
        of: whose version is shown.
        alone: the engines whose losses are those of one process without an engine.
        saved: as for a client.
        notes: of the two clients.
        ranks: how many.
    """
    return tuple(
        Client(
            f"{library}-{engine}",
            of,
            ((ranks, script(f"fsdp2_loop.py {engine} {library}")),),
            changes="nothing" if engine == "torch" else "the import",
            alone=script(f"fsdp2_loop.py none {library}") if engine in alone else "",
            saved=saved,
            note=note,
        )
        for engine, note in zip(("torch", "hyper_parallel"), notes, strict=True)
    )


CLIENTS = (
    *(
        Client(
            f"accelerate-{how}",
            "accelerate",
            ((2, script(f"accelerate_loop.py {how}")),),
            alone=script("accelerate_loop.py ddp"),
            saved=("saved/*",),
        )
        for how in ("ddp", "fsdp2")
    ),
    Client("trainer-ddp", "transformers", ((2, script("trainer.py ddp")),), saved=("saved/*",)),
    Client("trainer-fsdp2", "transformers", ((2, script("trainer.py fsdp")),), saved=("saved/*",)),
    Client("lightning-2d", "lightning", ((4, script("lightning_2d.py")),)),
    *fsdp2("lora", "peft", saved=("saved/*",)),
    *fsdp2("qlora", "bitsandbytes"),
    *fsdp2("float8", "torchao", alone=()),  # each rank scales by the largest of its own activations
    *fsdp2("float8-compile", "torchao", alone=()),
    *fsdp2(
        "float8-tp",
        "torchao",
        alone=(),
        ranks=4,
        notes=("", "one line more: `set_reduce_op_type('avg')`, as units with DTensors add gradients up"),
    ),
    *fsdp2("int8", "torchao", alone=()),  # moments of tensors below 4,096 elements, as of shards, stay in float32
    *fsdp2("save_pretrained", "transformers", saved=("saved/*",)),
    *fsdp2("compile", "torch"),
    *(
        Client(
            f"dcp-{one}-to-{other}",
            "torch",
            ((4, script(f"dcp.py {one} save")), (2, script(f"dcp.py {other} load"))),
            changes="the import",
        )
        for one, other in (("torch", "hyper_parallel"), ("hyper_parallel", "torch"))
    ),
    Client("nanoGPT", "nanoGPT", ((2, NANO_GPT),), data=tokens, map_device=True),
    Client("minGPT-ddp", "examples", ((2, MIN_GPT),), "distributed/minGPT-ddp/mingpt", characters, map_device=True),
    Client("examples-ddp", "examples", ((2, "example.py"),), "distributed/ddp", map_device=True),
    Client("examples-fsdp2", "examples", ((2, "example.py"),), "distributed/FSDP2", map_device=True),
    Client(
        "examples-tensor-parallel", "examples", ((2, "tensor_parallel_example.py"),), TENSOR_PARALLEL, map_device=True
    ),
    Client(
        "examples-sequence-parallel",
        "examples",
        ((2, "sequence_parallel_example.py"),),
        TENSOR_PARALLEL,
        map_device=True,
    ),
    Client(
        "picotron",
        "picotron",
        ((4, "train.py --config config.json"),),
        data=small_language,
        edits=(
            ("picotron/data.py", "tokenizer.batch_encode_plus(", "tokenizer("),
            ("picotron/model.py", "config.rope_theta", 'config.rope_parameters["rope_theta"]'),
        ),
        map_device=True,
        changes="two names of transformers 4, and stubs of flash_attn and wandb, which are not used",
    ),
    *(
        Client(
            f"torchtitan-{how}-{engine}",
            "torchtitan",
            ((ranks, TORCHTITAN + degrees),),
            data=c4,
            edits=edits,
            changes=changes,
            map_device=True,
            estimate=how == "fsdp",
            tolerance=tolerance,
            like="" if engine == "torch" else f"torchtitan-{how}-torch",
        )
        for engine, edits, changes in (
            ("torch", NO_TRITON, "an import of triton, which is not used"),
            ("hyper_parallel", (*NO_TRITON, OUR_ENGINE), "the import; an import of triton, which is not used"),
        )
        for how, ranks, degrees, tolerance in (
            ("fsdp", 2, "", 1e-5),
            ("2d", 4, "--parallelism.tensor_parallel_degree 2", 2e-2),  # bf16, added up in another order
        )
    ),
    Client("examples-fsdp-tp", "examples", ((4, "fsdp_tp_example.py"),), TENSOR_PARALLEL, map_device=True),
)
