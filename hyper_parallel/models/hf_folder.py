"""The one policy for folders of Hugging Face that somebody else has made: config, index, weights and tokenizer.

A name in a file of the folder, and a link in it, stay inside of the folder. Weights are safetensors. Code of the folder
is never run, nor is anybody asked whether to. What a file declares (layers, experts, the growth of text) has a budget,
which is checked before it is worked on. SECURITY.md says the same to users.
"""

from __future__ import annotations

import json
import math
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hyper_parallel.core.common.errors import InvalidValue

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
"""The files of a folder: which file has which tensor; or the only one."""

MOST_LAYERS, MOST_BLOCKS, MOST_GROWTH = 1024, 2**16, 64
"""Most layers of a model, most layers times experts, and most characters that normalizers make of one."""

_MOST_JSON = 2**28  # bytes; the index of a million tensors has less
_SHOWN = 6
_READ = frozenset({".json", ".safetensors", ".jinja", ".model", ".txt"})
_LAYERS = re.compile(r"(\w+_)?n?_?layers?")
_EXPERTS = re.compile(r"(\w+_)?experts")


def load_by_transformers(asked: str, kind: str, folder: str | Path, hint: str, **options: Any) -> Any:
    """Load a config, a tokenizer or a model from a folder by a class of transformers, as this policy has it.

    Args:
        asked: the start of an error message, "cannot ...".
        kind: name of the class, such as "AutoTokenizer".
        folder: to load from.
        hint: what to try where transformers cannot.
        options: of its `from_pretrained`.

    Raises:
        ValueError: the folder is against the policy, transformers is not installed, or cannot load it.
    """
    folder = Path(folder)
    _check_folder(asked, folder)
    if kind.startswith("AutoModel"):
        locate(asked, folder)
        options["use_safetensors"] = True
    try:
        import transformers
    except ImportError as error:
        install = "pip install 'hyper_parallel[text]'"
        raise InvalidValue(asked, "transformers is not installed", f"seen: {error}", install) from None
    try:
        auto = getattr(transformers, kind)
        return auto.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False, **options)
    except Exception as error:  # it raises errors of many kinds
        seen, blame = (str(error).strip().splitlines() or [type(error).__name__])[0], "transformers cannot load it"
        if "custom code" in str(error) or "trust_remote_code" in str(error):
            blame = "it is code of the folder, which is never run"
            hint = "train(config, model=...), where you import code that you have read; or a folder without auto_map"
        raise InvalidValue(asked, blame, f"seen: {seen}", hint) from None


def _check_folder(asked: str, folder: Path) -> None:
    """Refuse a folder of which transformers would read what is outside of it, or too large to work on."""
    if not folder.is_dir():
        raise InvalidValue(asked, *_what_is_there(folder / "config.json", f"folder: {folder}"))
    for path in (*folder.iterdir(), *folder.glob("additional_chat_templates/*")):
        if path.suffix in _READ:
            inside(asked, folder, str(path.relative_to(folder)))
    if (folder / "config.json").exists():
        settings = read_settings(asked, folder)
        inside(asked, folder, str(settings.get("transformers_weights") or SINGLE))
        kernels = [str(settings.get(key)) for key in ("attn_implementation", "_attn_implementation")]
        if any("/" in name for name in kernels):
            blame = "its attention is code of a hub, which would be fetched and run"
            hint = "config.json without attn_implementation"
            raise InvalidValue(asked, blame, f"attn_implementation: {', '.join(kernels)}", hint)


def read_settings(asked: str, folder: Path) -> dict[str, Any]:
    """Read the config.json of a folder, and check its counts of layers and experts against their budgets.

    Args:
        asked: the start of an error message.
        folder: that has it.

    Raises:
        ValueError: it cannot be read, holds no object, or describes more than can be worked on.
    """
    settings = read_json(asked, folder, "config.json")
    if not isinstance(settings, Mapping):
        blame = f"config.json holds a {type(settings).__name__}, not an object with keys"
        raise InvalidValue(asked, blame, f"config.json: {settings!r}"[:200], '{"model_type": "llama", ...}')
    counts = list(_numbers(settings))
    layers = max((count for name, count in counts if _LAYERS.fullmatch(name)), default=1)
    experts = max((count for name, count in counts if _EXPERTS.fullmatch(name)), default=1)
    if layers > MOST_LAYERS or max(layers, 1) * experts > MOST_BLOCKS:
        blame = "config.json has more layers and experts than are built of a folder"
        seen = f"layers: {layers}   experts in a layer: {experts}"
        hint = f"{MOST_LAYERS} layers, and {MOST_BLOCKS} experts in all layers, at most"
        raise InvalidValue(asked, blame, seen, hint)
    return dict(settings)


def _numbers(settings: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield the integers of a config, and of those inside of it, with their keys."""
    for name, value in settings.items():
        if type(value) is int:
            yield name, value
        elif isinstance(value, Mapping):
            yield from _numbers(value)


def check_normalizers(asked: str, folder: Path) -> None:
    """Refuse a tokenizer.json whose normalizers may write many characters in place of one.

    Args:
        asked: the start of an error message.
        folder: that may have one.

    Raises:
        ValueError: the most that they may write of a character is above `MOST_GROWTH`.
    """
    if not (folder / "tokenizer.json").exists():
        return
    content = read_json(asked, folder, "tokenizer.json")
    growth = math.prod(_growths(content.get("normalizer") if isinstance(content, Mapping) else None))
    if growth > MOST_GROWTH:
        blame = f"its normalizers may write {growth:,.0f} characters in place of one, and text would not fit memory"
        hint = f"normalizers that write {MOST_GROWTH} at most"
        raise InvalidValue(asked, blame, f"tokenizer.json: {content['normalizer']!r}"[:200], hint)


def _growths(normalizer: Any) -> Iterator[float]:
    """Yield how many characters each normalizer may write in place of one."""
    if not isinstance(normalizer, Mapping):
        return
    for each in normalizer.get("normalizers") or ():
        yield from _growths(each)
    pattern, content = normalizer.get("pattern"), str(normalizer.get("content") or normalizer.get("prepend") or "")
    if isinstance(pattern, Mapping) and "String" in pattern:
        yield max(1.0, len(content) / max(1, len(str(pattern["String"]))))
    else:
        matches_nothing = isinstance(pattern, Mapping) and _may_be_empty(str(pattern.get("Regex")))
        yield max(1.0, float(len(content)) + matches_nothing)


def _may_be_empty(pattern: str) -> bool:
    """Tell whether a pattern may match between two characters, as " *" does."""
    try:
        return re.search(pattern, "") is not None
    except re.error:  # Oniguruma's patterns have more than Python's
        return True


def inside(asked: str, folder: Path, name: str) -> Path:
    """Return the path of a file that a folder names; refuse one outside of it, also behind links.

    A snapshot in the cache of huggingface_hub holds links to the folder `blobs` beside `snapshots`, which are its own.

    Args:
        asked: the start of an error message.
        folder: that names the file.
        name: as it stands there.

    Raises:
        ValueError: the file is elsewhere.
    """
    path, home = folder / name, folder.resolve()
    blobs = home.parents[1] / "blobs" if home.parent.name == "snapshots" else home
    try:
        real = path.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a circle of links; a zero byte
        raise InvalidValue(asked, f"{name!r} is no file", f"seen: {error}", "another copy of it") from None
    is_plain = not Path(name).is_absolute() and ".." not in Path(name).parts
    if is_plain and (real.is_relative_to(home) or real.is_relative_to(blobs)):
        return path
    blame, hint = f"{name!r} is outside of the folder", f"the file itself in the folder: cp -rL {folder} FOLDER"
    raise InvalidValue(asked, blame, f"it is: {real}", hint)


def read_json(asked: str, folder: Path, name: str) -> Any:
    """Read a JSON file of a folder.

    Args:
        asked: the start of an error message.
        folder: that has it.
        name: of the file.

    Raises:
        ValueError: it is missing, outside of the folder, too large, or no JSON.
    """
    hint = "the folder that save_pretrained, or export_huggingface, has written"
    path = inside(asked, folder, name)
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MOST_JSON:
            seen = f"seen: {path}, of {status.st_size} bytes"
            raise InvalidValue(asked, f"{path.name} is no file, or too large for what it is", seen, hint)
        text = path.read_bytes()
    except OSError as error:
        raise InvalidValue(asked, *_what_is_there(path, f"seen: {error}")) from None
    try:
        return json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise InvalidValue(asked, f"{path.name} is no JSON", f"seen: {error}", "another copy of it") from None


def _what_is_there(path: Path, seen: str) -> tuple[str, str, str]:
    """Say what a folder without a readable config.json is, what was seen, and what to try."""
    folder, hint = path.parent, "the folder that save_pretrained, or export_huggingface, has written"
    if not folder.is_dir():
        if folder.as_posix().count("/") == 1:
            hint = f"a folder, as nothing is fetched: hf download {folder} --local-dir FOLDER"
        return "there is no such folder", seen, hint
    if (folder / "adapter_config.json").is_file():
        hint = "the folder of its model; or, of hyper-parallel train, hyper-parallel export --merge"
        return "it holds an adapter, and no model", seen, hint
    if any(folder.glob("step-*/")):
        return "it holds checkpoints of a run", seen, f"hyper-parallel export {folder} out/hf, and start from that"
    return f"{path.name} cannot be read", seen, hint


def locate(asked: str, folder: Path) -> dict[str, Path]:
    """Return the safetensors file of each tensor in a folder.

    Args:
        asked: the start of an error message.
        folder: with weights.

    Raises:
        ValueError: there are none, or pickled ones; a file that is missing, damaged or outside of the folder.
    """
    from safetensors import SafetensorError, safe_open

    if (folder / INDEX).exists():
        index = read_json(asked, folder, INDEX)
        where = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(where, dict) or not all(isinstance(file, str) for file in where.values()):
            blame, hint = f"{INDEX} does not say which file has which tensor", '{"weight_map": {tensor: file, ...}}'
            raise InvalidValue(asked, blame, f"weight_map: {where!r}"[:200], hint)
        paths = {file: inside(asked, folder, file) for file in dict.fromkeys(where.values())}
        files = {name: paths[file] for name, file in where.items()}
    elif (folder / SINGLE).is_file():
        try:
            with safe_open(inside(asked, folder, SINGLE), framework="pt") as file:
                files = dict.fromkeys(file.keys(), folder / SINGLE)
        except (SafetensorError, OSError) as error:
            blame, hint = f"{SINGLE} is damaged, or no safetensors file", "another copy of it"
            raise InvalidValue(asked, blame, f"seen: {error}", hint) from None
    else:
        files = {}
    missing = list(dict.fromkeys(str(path) for path in files.values() if not path.is_file()))
    if missing:
        raise InvalidValue(asked, "files that the index names are missing", some_of(missing), "a complete copy")
    if not files:
        there = sorted(path.name for path in folder.iterdir())
        pickled = [name for name in there if name.endswith((".bin", ".pt", ".pth"))]
        blame = "its weights are pickled, and reading those may run any code" if pickled else "it has no weights"
        hint = f"a folder with {SINGLE}: model.save_pretrained(folder) of transformers writes that"
        raise InvalidValue(asked, blame, f"files: {some_of(pickled or there)}", hint)
    return files


def some_of(names: Sequence[str]) -> str:
    """Write names for people, not too many of them.

    >>> some_of(list("abcdefgh"))
    'a, b, c, d, e, f and 2 more'

    Args:
        names: in the order to show them in.
    """
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
