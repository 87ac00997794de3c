"""`python -m sim run`: what a script sees of its process, what is shown of it, and what is said when it fails."""

from __future__ import annotations

import copy
import importlib
import io
import multiprocessing
import os
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import warm
from torch._subclasses.fake_tensor import FakeTensorMode

import sim
from sim.script.launch import main
from sim.script.values import Values

pytestmark = pytest.mark.sim

Run = Callable[..., tuple[int, str, str]]
START = "import os, sys, torch, torch.distributed as dist\nrank = int(os.environ['RANK'])\n"


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Write a script and run it; the exit code, and what came on both outputs."""
    monkeypatch.chdir(tmp_path)

    def run(source: str, *options: str, arguments: tuple[str, ...] = (), nproc: int = 2) -> tuple[int, str, str]:
        Path("script.py").write_text(START + textwrap.dedent(source))
        code = main(["--nproc", str(nproc), *options, "script.py", *arguments])
        return code, *capsys.readouterr()

    return run


def test_what_is_written_to_a_tensor_that_nobody_knows_is_not_known() -> None:
    values = Values()
    with FakeTensorMode():
        activations, ones = torch.empty(3), torch.ones(3)
    values.set(ones, torch.ones(3), stands_in=False)
    for written, other in ((activations, ones), (ones, activations)):
        values.follow(torch.ops.aten.add_.Tensor, (written, other), {}, written)
    assert values.of(activations) is None
    assert values.is_stand_in(ones)
    real = torch.zeros(3)
    values.follow(torch.ops.aten.add_.Tensor, (real, activations), {}, real)
    assert real.tolist() == [0.0] * 3  # only what stands for a tensor is overwritten


# -- what a rank sees --------------------------------------------------------------------------------------------


def test_the_variables_of_torchrun(run: Run) -> None:
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"]
    names += ["TORCHELASTIC_RUN_ID", "EXTRA"]
    source = f"print(*(os.environ[name] for name in {names}), sys.argv, __file__ == os.path.abspath('script.py'))"
    code, out, err = run(source, "--show", "all", "--env", "EXTRA=a=b", arguments=("--x", "1"), nproc=3)
    assert (code, err) == (0, "")
    lines = [f"[rank {rank}] {rank} {rank} 3 3 0 sim 29500 sim a=b ['script.py', '--x', '1'] True" for rank in range(3)]
    assert sorted(out.splitlines()) == lines


def test_the_script_is_main_and_its_classes_travel(run: Run) -> None:
    source = """
        class Thing:
            def __init__(self, value): self.value = value

        if __name__ == "__main__":
            dist.init_process_group("nccl")
            things = [None] * dist.get_world_size()
            dist.all_gather_object(things, Thing(rank))
            assert sys.modules["__main__"].Thing is Thing
            print([thing.value for thing in things if type(thing) is Thing], dist.get_backend())
    """
    assert run(source, nproc=3) == (0, "[0, 1, 2] nccl\n", "")
    assert "Thing" not in vars(sys.modules["__main__"])


@pytest.mark.parametrize("seed", range(3))
def test_modules_of_the_user_are_each_ranks_own(run: Run, seed: int) -> None:
    Path("package").mkdir()
    Path("package/__init__.py").write_text("state = []\n")
    Path("package/part.py").write_text("from package import state\nfrom . import state as same\n")
    Path("helper.py").write_text("import torch.distributed as dist\ndist.init_process_group()\ndist.barrier()\n")
    source = """
        import helper, package.part
        package.state.append(rank)
        dist.barrier()
        import package.late
        states = [None] * 4
        dist.all_gather_object(states, (package.part.same, package.late.rank))
        print(states)
    """
    Path("package/late.py").write_text("import os\nrank = int(os.environ['RANK'])\n")
    assert run(source, "--seed", str(seed), nproc=4)[:2] == (0, f"{[([r], r) for r in range(4)]}\n")
    assert not {"helper", "package", "package.part", "package.late"} & set(sys.modules)


@pytest.mark.parametrize("seed", range(2))
def test_a_module_that_the_script_loads_from_a_file(run: Run, seed: int) -> None:
    """As `importlib` shows it: the script puts it into `sys.modules` itself."""
    source = """
        import importlib.util, pickle
        from pathlib import Path
        dist.init_process_group("gloo")
        path = Path(f"plugin_{rank}.py")
        path.write_text(f"class Thing:\\n    rank = {rank}\\n")
        spec = importlib.util.spec_from_file_location("plugin", path)
        module = importlib.util.module_from_spec(spec)
        sys.modules["plugin"] = module
        spec.loader.exec_module(module)
        dist.barrier()
        import plugin
        things = [None] * dist.get_world_size()
        dist.all_gather_object(things, module.Thing())
        print(plugin is module, [type(thing) is module.Thing for thing in things], plugin.Thing.rank)
    """
    code, out, err = run(source, "--show", "all", "--seed", str(seed))
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == [f"[rank {rank}] True [True, True] {rank}" for rank in range(2)]
    assert "plugin" not in sys.modules


def test_modules_that_the_script_makes_by_hand(run: Run) -> None:
    """Those without a spec: stand-ins for packages that are not there, and such as forbid an import."""
    source = """
        import types, numpy
        from unittest.mock import MagicMock
        dist.init_process_group("gloo")
        for name in ("stand_in", "stand_in.part", "beside", "numpy.of_numpy"):
            if name not in sys.modules:
                module = sys.modules[name] = types.ModuleType(name)
                module.rank = rank
        sys.modules["beside"].__file__ = os.path.abspath("beside.py")
        sys.modules["mocked"] = MagicMock(rank=rank)
        if rank == 1:
            sys.modules["forbidden"] = None
        dist.barrier()
        import stand_in.part, beside, mocked
        print(stand_in.rank, sys.modules["stand_in.part"].rank, beside.rank, mocked.rank, "forbidden" in sys.modules)
    """
    code, out, err = run(source, "--show", "all")
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == [f"[rank {rank}] {rank} {rank} {rank} {rank} {rank == 1}" for rank in range(2)]
    assert not {"stand_in", "stand_in.part", "beside", "mocked", "forbidden"} & set(sys.modules)
    sys.modules.pop("numpy.of_numpy")  # of a package that ranks share


def test_hooks_and_settings_of_a_process_are_each_ranks_own(run: Run) -> None:
    source = """
        import logging, tempfile, threading
        dist.init_process_group("gloo")
        heard = []
        threading.excepthook = lambda args: heard.append(str(args.exc_value))
        def fails(): raise ValueError(f"of rank {rank}")
        thread = threading.Thread(target=fails)
        dist.barrier()
        thread.start()
        thread.join()
        if rank == 0:
            sys.unraisablehook = sys.displayhook = sys.stdin = None
            tempfile.tempdir = "/"
            logging.setLoggerClass(type("Own", (logging.Logger,), {}))
            logging.setLogRecordFactory(print)
        dist.barrier()
        own = sys.unraisablehook, sys.displayhook, sys.stdin
        print(heard, own.count(None), tempfile.gettempdir() == "/", logging.getLoggerClass().__name__,
              logging.getLogRecordFactory() is print)
    """
    code, out, err = run(source, "--show", "all")
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == [
        "[rank 0] ['of rank 0'] 3 True Own True",
        "[rank 1] ['of rank 1'] 0 False Logger False",
    ]


def test_what_is_installed_is_shared(run: Run) -> None:
    source = """
        import colorsys, numpy, hyper_parallel
        dist.init_process_group()
        ids = [None] * 2
        dist.all_gather_object(ids, [id(module) for module in (colorsys, numpy, hyper_parallel, torch)])
        print(ids[0] == ids[1])
    """
    assert run(source) == (0, "True\n", "")


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Packages as pip leaves them: one with the state of a process in a class, and one that imports it."""
    packages = tmp_path / "lib" / "site-packages"
    (packages / "stateful").mkdir(parents=True)
    (packages / "stateful" / "__init__.py").write_text("from stateful.state import State, name_of\nstep = 0\n")
    (packages / "stateful" / "state.py").write_text(
        "class State:\n    shared = {}\n    def __init__(self, rank=None):\n        self.__dict__ = self.shared\n"
        "        if not self.shared: self.rank = rank\n\ndef name_of(state):\n    return type(state) is State\n"
    )
    (packages / "user_of_it.py").write_text("from stateful import State\nimport stateful\nmade = lambda r: State(r)\n")
    monkeypatch.syspath_prepend(str(packages))
    yield packages
    for name in ("stateful", "stateful.state", "user_of_it"):
        sys.modules.pop(name, None)


OWN_STATE = """
    dist.init_process_group()
    {first}
    import user_of_it
    state = user_of_it.made(rank)
    import stateful.state
    stateful.step += rank
    dist.barrier()
    found = [None] * 3
    same = isinstance(state, user_of_it.State) and stateful.name_of(state) and user_of_it.stateful.step == rank
    dist.all_gather_object(found, (stateful.State().rank, user_of_it.State().rank, same, id(user_of_it)))
    print([each[:3] for each in found], len(set(each[3] for each in found)))
"""


@pytest.mark.parametrize("first", ["pass", "import stateful", "import user_of_it"])
@pytest.mark.parametrize("seed", ["0", "1"])
def test_a_package_that_keeps_the_state_of_a_process(run: Run, installed: Path, first: str, seed: str) -> None:
    """Each rank has a copy of the package; what else is installed is shared, and refers to the calling rank's copy."""
    code, out, err = run(OWN_STATE.format(first=first), "--own", "stateful", "--seed", seed, nproc=3)
    assert (code, out, err) == (0, f"{[(r, r, True) for r in range(3)]} 1\n", "")
    assert run(OWN_STATE.format(first=first), nproc=3)[1] != out  # and one state for all without that


def test_packages_that_are_known_to_keep_it(run: Run, installed: Path) -> None:
    (installed / "accelerate").mkdir()
    (installed / "accelerate" / "__init__.py").write_text("import os\nrank = os.environ['RANK']\n")
    source = "import accelerate\nprint(accelerate.rank)\n"
    assert run(source, "--show", "all") == (0, "[rank 0] 0\n[rank 1] 1\n", "")
    assert "accelerate" not in sys.modules


def test_a_function_that_was_defined_outside_of_the_ranks(installed: Path) -> None:
    """What it has of a package from its module, or from the function around it, is each rank's own inside."""
    import stateful
    import user_of_it
    from stateful import State

    def body() -> tuple[int, int, bool]:
        state, stateful.step = State(dist.get_rank()), dist.get_rank()
        dist.barrier()
        return user_of_it.State().rank, stateful.step, isinstance(state, user_of_it.State)

    State("outside")
    for _ in range(2):
        assert sim.run(body, world_size=3, own=["stateful"]) == [(r, r, True) for r in range(3)]
    assert (State().rank, stateful.step, user_of_it.State, sys.modules["stateful"]) == ("outside", 0, State, stateful)
    assert {each[:2] for each in sim.run(body, world_size=1)} == {("outside", 0)}


class _ByPython(pickle._Pickler):
    """In Python, as those are that find more to pickle: dill's, by which datasets names what it has computed."""


def _pickled(kind: type, value: object) -> bytes:
    file = io.BytesIO()
    kind(file).dump(value)
    return file.getvalue()


@pytest.mark.tier("test")
@pytest.mark.parametrize("pickler", [pickle.Pickler, _ByPython])
@pytest.mark.parametrize("first", [True, False], ids=["seen before", "new"])
def test_what_is_of_a_package_is_pickled_by_its_name(installed: Path, pickler: type, first: bool) -> None:
    """Also what stands for it in modules that ranks share; each finds its own by that name."""
    if first:
        importlib.import_module("user_of_it")

    def body() -> list[bytes]:
        import stateful
        import user_of_it

        texts = [_pickled(pickler, each) for each in (stateful.State, user_of_it.State, user_of_it.State(3))]
        every: list[list[bytes]] = [[]] * 2
        dist.all_gather_object(every, texts)
        for text in every[1 - dist.get_rank()]:
            loaded = pickle.loads(text)
            assert stateful.State in (loaded, type(loaded))
            assert b"stateful.state" in text
            assert b"sim." not in text
        with multiprocessing.get_context("fork").Pool(1) as pool:
            assert pool.apply(stateful.name_of, (stateful.State(),)) is True
        assert copy.deepcopy(user_of_it.State) is stateful.State
        if first:
            assert pickle.loads(_pickled(pickler, user_of_it.stateful)) is stateful
        return texts

    found = sim.run(body, 2, own=["stateful"])
    import stateful

    assert [stateful.State in (each, type(each)) for each in map(pickle.loads, found[0])] == [True] * 3


@pytest.mark.parametrize("name", ["numpy", "torch", "sys", "a-b", ""])
def test_packages_that_cannot_be_copied(name: str) -> None:
    with pytest.raises(ValueError, match=rf"^cannot give each rank a copy of '{name}': own takes names .*\n  own: "):
        sim.world(2, own=[name])


def test_the_process_is_left_as_it_was(run: Run) -> None:
    before = list(sys.path), list(sys.argv), sys.stdout, sys.modules["__main__"], torch.get_default_dtype()
    assert run("sys.path.append('x'); sys.argv.append('y'); import atexit; atexit.register(print, 'bye')")[1] == "bye\n"
    assert (list(sys.path), list(sys.argv), sys.stdout, sys.modules["__main__"], torch.get_default_dtype()) == before
    assert sim.run(lambda: 1, 2) == [1, 1], "the module that runs scripts does not hide sim.run"


FAIL_AT_EXIT = """
    import atexit
    dist.init_process_group("gloo")
    atexit.register(print, "bye from", rank)
    if rank == 1:
        {end}
    dist.barrier()
"""


@pytest.mark.parametrize(("end", "status"), [("sys.exit(3)", 3), ("raise KeyError(1)", 1), ("1 / 0", 1)])
def test_a_rank_that_fails_says_goodbye(run: Run, end: str, status: int) -> None:
    code, out, _ = run(FAIL_AT_EXIT.format(end=end), "--show", "all")
    assert (code, out) == (status, "[rank 1] bye from 1\n"), "torchrun ends the other rank, which waits, by a signal"


HOOK = """
    import atexit
    def hook(kind, error, lines):
        print("hook", kind.__name__, error, os.path.basename(lines.tb_frame.f_code.co_filename))
        {inside}
    sys.excepthook = hook
    atexit.register(print, "bye from", rank)
    dist.init_process_group("gloo")
    if rank == 1:
        {end}
    dist.barrier()
"""


@pytest.mark.parametrize(
    ("end", "inside", "shown"),
    [
        ("raise ValueError('boom')", "", ["hook ValueError boom script.py", "bye from 1"]),
        ("raise ValueError('boom')", "1 / 0", ["hook ValueError boom script.py", "bye from 1"]),
        ("sys.exit(3)", "", ["bye from 1"]),
    ],
)
def test_a_hook_of_the_script_hears_of_a_rank_that_fails(run: Run, end: str, inside: str, shown: list[str]) -> None:
    """As in Python: before what is registered with `atexit`, and not of `sys.exit`."""
    code, out, err = run(HOOK.format(end=end, inside=inside), "--show", "all")
    assert (code, out.splitlines()) == (3 if "exit" in end else 1, [f"[rank 1] {line}" for line in shown])
    assert ("[rank 1] Error in sys.excepthook:" in err) == bool(inside)
    assert ("ValueError: boom" in err) == ("boom" in end), "the report of the rank comes as well"


def test_an_error_that_has_no_text_is_reported(run: Run) -> None:
    code, _, err = run("class Mute(Exception):\n    def __str__(self): raise ValueError\nraise Mute()")
    assert code == 1
    assert "\nMute: <exception str() failed>\n" in err
    assert err.endswith("replay: python -m sim run --nproc 2 --seed 0 script.py\n")


def test_what_fails_at_exit_is_shown_and_is_no_failure(run: Run) -> None:
    code, out, err = run(
        "import atexit; atexit.register(print, 'bye'); atexit.register(lambda: 1 / rank)", "--show", "0"
    )
    assert run("import atexit; atexit.register(sys.exit, 5)")[0] == 0
    assert (code, out) == (0, "bye\n")
    assert err.startswith("[rank 0] Exception ignored in atexit callback: <function <lambda> at ")
    assert err.endswith("[rank 0] ZeroDivisionError: division by zero\n")


def test_a_barrier_at_exit_that_not_all_reach(run: Run) -> None:
    code, _, err = run("import atexit; dist.init_process_group('gloo'); rank or atexit.register(dist.barrier)")
    assert code == 1
    assert "rank 0  waits in barrier #0 of group 'world'" in err


# -- what is shown -----------------------------------------------------------------------------------------------

SPEAK = """
    import logging
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.ERROR, format="%(message)s")
    print("one\\ntwo", end="")
    logging.info("info")
    logging.getLogger("a.b").error("error")
"""


def test_rank_0_is_shown_plain_and_errors_of_all_with_their_rank(run: Run) -> None:
    code, out, err = run(SPEAK)
    assert (code, out) == (0, "one\ntwo")
    assert sorted(err.splitlines()) == ["[rank 0] error", "[rank 0] info", "[rank 1] error"]


def test_all_ranks_are_shown_with_their_rank(run: Run) -> None:
    assert sorted(run(SPEAK, "--show", "all")[1].splitlines()) == [
        f"[rank {rank}] {word}" for rank in range(2) for word in ("one", "two")
    ]
    assert sorted(run("print(rank)", "--show", "1,2", nproc=4)[1].splitlines()) == ["[rank 1] 1", "[rank 2] 2"]
    assert run("print(rank)", "--show", "2", nproc=4)[1] == "2\n"


def test_print_replaced_on_all_ranks_but_one(run: Run) -> None:
    source = """
        import builtins
        dist.init_process_group()
        if rank != 1:
            builtins.print = lambda *args: None
        dist.barrier()
        print("from", rank)
    """
    assert run(source, "--show", "all", nproc=3) == (0, "[rank 1] from 1\n", "")


# -- what goes wrong on a rank -----------------------------------------------------------------------------------


def test_a_failure_shows_the_users_lines_and_how_to_replay(run: Run) -> None:
    source = """
        def divide(x):
            return x / 0

        dist.init_process_group()
        if rank == 1:
            divide(1)
        dist.barrier()
    """
    code, out, err = run(source, "--seed", "5", arguments=("a b",))
    assert (code, out) == (1, "")
    assert "in divide\n    return x / 0\n" in err
    assert "rank 1 raised ZeroDivisionError: division by zero\n" in err
    assert err.endswith("  replay: python -m sim run --nproc 2 --seed 5 script.py 'a b'\n")
    assert "/sim/" not in err


def test_a_failure_in_torch_keeps_torchs_lines(run: Run) -> None:
    err = run("torch.nn.Linear(2, 2)(torch.ones(3))")[2]
    assert "script.py" in err
    assert "torch/nn/modules/linear.py" in err
    assert "/sim/" not in err


@pytest.mark.parametrize(
    ("call", "code", "said"),
    [
        ("sys.exit(3)", 3, "rank 1 called sys.exit(3)\n  seen: a status other than 0, at script.py:"),
        ("sys.exit('no data')", 1, "no data\nrank 1 called sys.exit('no data')\n  seen: "),
        ("sys.exit(257)", 1, "rank 1 called sys.exit(257)\n  seen: "),
        ("os._exit(3)", 1, "called os._exit(3), which would end all 2 simulated ranks\n"),
        ("torch.multiprocessing.spawn(print)", 1, "try: under torchrun and in sim, call print(int("),
        ("sim.run(print, 2)", 1, "a rank cannot start ranks of its own\n"),
        (
            "sim.script.launch.main(['--nproc', '2', 'script.py']) and sys.exit(2)",
            2,
            "this process is a rank already\n",
        ),
        ("dist.barrier()", 1, "Deadlock: no rank can run: 1 of 2 ranks wait"),
        ("torch.zeros(1, device='cuda')", 1, "  try: --map-device cuda, which puts on the CPU"),
        ("import torch_npu", 1, "  try: --map-device npu, which puts on the CPU"),
        ("torch.zeros(1, device='npu')", 1, "  try: --map-device npu, which puts on the CPU"),
    ],
)
def test_what_is_said(run: Run, call: str, code: int, said: str) -> None:
    if "cuda" in call and torch.cuda.is_available():
        pytest.skip("this machine has the device")
    got, _, err = run(
        f"import sim.script.launch\ndist.init_process_group()\nif rank == 1:\n    {call}\n", "--seed", "1"
    )
    assert got == code
    assert said in err
    assert "--nproc 2 --seed 1 script.py\n" in err


@pytest.mark.parametrize("status", [0, 256, -512])
def test_sys_exit_0_is_an_end_like_any_other(run: Run, status: int) -> None:
    """Of a status the shell sees the lowest eight bits."""
    assert run(f"print('done')\nsys.exit({status})") == (0, "done\n", "")
    assert sim.run(lambda: sys.exit(status), 2) == [None, None]


def test_a_script_that_is_no_python(run: Run) -> None:
    code, _, err = run("x = (\n")
    assert code == 1
    assert 'script.py", line 3\n' in err
    assert "SyntaxError" in err


@pytest.mark.tier("test")
def test_processes_that_load_data(run: Run) -> None:
    source = """
        from torch.utils.data import DataLoader, Dataset

        class Numbers(Dataset):
            def __len__(self): return 4
            def __getitem__(self, i): return torch.tensor(float(i + 10 * rank))

        dist.init_process_group()
        total = sum(DataLoader(Numbers(), num_workers=1))
        dist.all_reduce(total)
        print(total.item())
    """
    assert run(source)[:2] == (0, "52.0\n")


@pytest.mark.tier("test")
def test_processes_that_communicate(run: Run) -> None:
    source = """
        dist.init_process_group()
        child = os.fork()
        if child == 0:
            try:
                dist.barrier()
            except Exception as error:
                os._exit(7 if "communicate from the rank itself" in str(error) else 8)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    assert run(source)[:2] == (0, "7\n")


# -- devices -----------------------------------------------------------------------------------------------------

DEVICES = """
    kind = sys.argv[1]
    if kind == "npu":
        import torch_npu
    device = getattr(torch, kind)
    device.set_device(rank)
    dist.init_process_group("hccl" if kind == "npu" else "nccl", device_id=torch.device(kind, rank))
    model = getattr(torch.nn.Linear(4, 1, device=f"{kind}:{rank}").to(kind), kind)()
    model = torch.nn.parallel.DistributedDataParallel(model.to(rank), device_ids=[rank])
    x = getattr(torch.ones(2, 4), kind)(rank).to(torch.device(kind, rank), non_blocking=True)
    model(x + torch.ones(4, device=device.current_device())).sum().backward()
    mesh = torch.distributed.init_device_mesh(kind, (2,))
    dist.barrier(device_ids=[rank])
    device.synchronize()
    print(device.is_available(), device.device_count(), device.current_device(), x.device, mesh.device_type)
"""


def test_a_script_for_cuda(run: Run) -> None:
    assert run(DEVICES, "--map-device", "cuda", arguments=("cuda",)) == (0, "True 2 0 cpu cpu\n", "")
    code, _, err = run("torch.cuda.set_device(2)", "--map-device", "cuda")
    assert code == 1
    assert "cannot set the device: 2 simulated ranks have 2 devices, 0 to 1\n  device: 2, asked for by rank " in err
    assert "--map-device cuda script.py\n" in err, "the replay maps as well"


@pytest.mark.tier("test")
def test_a_script_for_npu(tmp_path: Path) -> None:
    """In a process of its own: torch's name for a device that is not its own is there for good."""
    (tmp_path / "script.py").write_text(START + textwrap.dedent(DEVICES))
    command = [sys.executable, "-m", "sim", "run", "--nproc", "2", "--map-device", "npu", str(tmp_path / "script.py")]
    done = warm.run([*command, "npu"])
    assert (done.returncode, done.stdout, done.stderr) == (0, "True 2 0 cpu cpu\n", "")


# -- mistakes in what was asked ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (
            ["--nproc", "2", "trian.py"],
            "cannot run trian.py on 2 ranks: it does not exist\n  script: {here}/trian.py\n"
            "  try: python -m sim run --nproc 2 train.py\n",
        ),
        (
            ["--nproc", "0", "train.py"],
            "cannot run train.py on 0 ranks: --nproc must be from 1 to 65,536\n  --nproc: 0\n"
            "  try: python -m sim run --nproc 8 train.py\n",
        ),
        (
            ["--nproc", "2", "--env", "DEBUG", "train.py"],
            "cannot set an environment variable: --env takes a name, an equals sign and a value\n  --env: 'DEBUG'\n"
            "  try: --env DEBUG=1\n",
        ),
        (
            ["--nproc", "2", "--show", "0,2", "train.py"],
            "cannot show the output of ranks: --show takes ranks from 0 to 1, with commas, or all\n  --show: '0,2'\n"
            "  try: --show 0, --show all\n",
        ),
        (
            ["--nproc", "2", "."],
            "cannot run . on 2 ranks: it is a folder\n  script: {here}\n  try: python -m sim run --nproc 2 train.py\n",
        ),
        (
            ["--nproc", "2", "my runs/tain.py"],
            "cannot run my runs/tain.py on 2 ranks: it does not exist\n  script: {here}/my runs/tain.py\n"
            "  try: python -m sim run --nproc 2 'my runs/train.py'\n",
        ),
        (
            ["--nproc", "2", "pipe"],
            "cannot run pipe on 2 ranks: it is no regular file\n  script: {here}/pipe\n"
            "  try: python -m sim run --nproc 2 train.py\n",
        ),
        (
            ["--nproc", "2", f"{'x' * 256}/x.py"],
            f"cannot run {'x' * 256}/x.py on 2 ranks: it does not exist\n  script: {{here}}/{'x' * 256}/x.py\n"
            "  try: the path of a Python file\n",
        ),
        (
            ["--nproc", "0", "-m", "json.tool"],
            "cannot run json.tool on 0 ranks: --nproc must be from 1 to 65,536\n  --nproc: 0\n"
            "  try: python -m sim run --nproc 8 -m json.tool\n",
        ),
    ],
)
def test_mistakes(
    command: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    Path("my runs").mkdir()
    Path("my runs/train.py").touch()
    os.mkfifo("pipe")
    assert main(command) == 2
    assert capsys.readouterr().err == "error: " + said.format(here=tmp_path)


def test_ranks_in_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert main(["--nproc", "2", str(tmp_path / "train.py")]) == 2
    assert capsys.readouterr().err == (
        "error: cannot start 2 simulated ranks: this process is a rank already\n"
        "  seen: RANK=1, WORLD_SIZE=4 in the environment\n"
        "  try: start it without torchrun, and not from a script that runs on ranks\n"
    )


@pytest.mark.tier("test")
def test_the_commands(tmp_path: Path) -> None:
    """Both commands lead to the same place, which the message names as it was typed."""
    from typer.testing import CliRunner

    from hyper_parallel.cli import app

    result = CliRunner().invoke(app, ["simulate", "--nproc", "0", "x.py"])
    assert result.exit_code == 2
    assert "try: hyper-parallel simulate --nproc 8 x.py" in result.output
    result = CliRunner().invoke(app, ["simulate", "--standalone", "--nproc-per-node=2", "-m", "no_such.module"])
    assert result.exit_code == 2
    assert "cannot run the module no_such.module on 2 ranks" in result.output
    source = "import os, sys, warnings\nprint(sys.path[0] == os.path.dirname(__file__), sys.argv[1:])\n"
    (tmp_path / "x.py").write_text(source + "warnings.warn('careful')\n")
    command = [sys.executable, "-m", "sim", "run", "--nproc", "2", str(tmp_path / "x.py"), "--help"]
    done = warm.run(command)
    assert (done.returncode, done.stdout) == (0, "True ['--help']\n")
    assert sorted(line[:9] + line[-8:] for line in done.stderr.splitlines() if line.endswith("careful")) == [
        "[rank 0]  careful",
        "[rank 1]  careful",
    ]


@pytest.mark.parametrize("theirs", ["sim.py", "sim/__init__.py"])
def test_a_project_with_a_sim_of_its_own(run: Run, tmp_path: Path, theirs: str) -> None:
    """Its scripts import theirs; each rank has a copy, as of other modules of the user's."""
    Path(theirs).parent.mkdir(exist_ok=True)
    Path(theirs).write_text("import os\nwhose = 'theirs'\nrank = os.environ['RANK']\n")
    source = """
        dist.init_process_group()
        import sim
        dist.barrier()
        from sim import whose
        print(whose, sim.rank == str(rank))
    """
    code, out, err = run(source, "--show", "all")
    assert (code, sorted(out.splitlines()), err) == (0, ["[rank 0] theirs True", "[rank 1] theirs True"], "")
    assert sys.modules["sim"] is sim


@pytest.mark.tier("full")
def test_the_command_in_a_folder_with_a_sim_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "sim.py").write_text("whose = 'theirs'\n")
    (tmp_path / "x.py").write_text("import os, sim\nprint(sim.whose, os.environ['RANK'])\n")
    command = [sys.executable, "-m", "hyper_parallel", "simulate", "--nproc", "2", "--show", "1", "x.py"]
    environment = {**os.environ, "PYTHONPATH": str(Path(sim.__file__).parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, "theirs 1\n", "")


def test_without_run(capsys: pytest.CaptureFixture[str]) -> None:
    from sim.__main__ import _main

    assert _main([]) == 2
    assert capsys.readouterr().err.startswith("usage: python -m sim run --nproc N")
    assert _main(["--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: ")


# -- torchrun's command line -------------------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a package of the user's, from which commands are started."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "trainers"
    folder.mkdir()
    (folder / "__init__.py").write_text("import os\nowner = os.environ['RANK']\n")
    (folder / "settings.py").write_text("steps = 3\n")
    source = "import sys\nfrom . import owner\nfrom .settings import steps\n"
    names = "__name__, __package__, __spec__.name, owner, steps, sys.argv[1:], sys.argv[0] == __file__"
    (folder / "small.py").write_text(f"{source}print({names})\n")
    (folder / "__main__.py").write_text("import os\nif os.environ['RANK'] == '1':\n    raise ValueError('no good')\n")
    return tmp_path


@pytest.mark.parametrize("option", ["-m", "--module"])
def test_a_module_as_torchrun_takes_it(package: Path, capsys: pytest.CaptureFixture[str], option: str) -> None:
    before = dict(sys.modules)
    assert main(["--nproc", "2", "--show", "all", option, "trainers.small", "-m", "--lr", "1"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    line = "[rank {0}] __main__ trainers trainers.small {0} 3 ['-m', '--lr', '1'] True"
    assert sorted(out.splitlines()) == [line.format(rank) for rank in range(2)]
    assert {name for name in sys.modules if name.startswith("trainers")} == set()
    assert sys.modules["__main__"] is before["__main__"]


def test_a_package_is_run_by_its_main_and_replayed_as_a_module(
    package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--nproc", "2", "-m", "trainers", "--x"]) == 1
    err = capsys.readouterr().err
    assert f'File "{package / "trainers" / "__main__.py"}", line 3' in err
    assert "  replay: python -m sim run --nproc 2 --seed 0 -m trainers --x\n" in err


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("trainers.large", "it in the folder that the module is in"),
        ("nothing.at.all", "it in the folder that the module is in"),
        ("trainers/small.py", "python -m sim run --nproc 2 trainers/small.py"),
    ],
)
def test_a_module_that_is_not_there(package: Path, capsys: pytest.CaptureFixture[str], name: str, hint: str) -> None:
    assert main(["--nproc", "2", "-m", name]) == 2
    assert capsys.readouterr().err == (
        f"error: cannot run the module {name} on 2 ranks: there is none in Python source\n"
        f"  -m: {name}, expected a module, or a package with a __main__.py, as for python -m\n"
        f"  try: {hint}\n"
    )


@pytest.mark.parametrize(
    "options",
    [
        ["--standalone", "--nnodes=1", "--nproc-per-node=2"],
        ["--nnodes", "1:1", "--nproc_per_node", "2", "--node_rank=0", "--max-restarts=3"],
        ["--nproc", "2", "--master-addr", "host", "--master_port=1234", "--rdzv-backend=c10d", "--rdzv_id", "7"],
        ["--nproc", "2", "--rdzv-endpoint=host:1", "--rdzv-conf", "timeout=9", "--monitor-interval", "1"],
    ],
)
def test_options_of_torchrun_that_mean_nothing_here(package: Path, capsys: pytest.CaptureFixture[str], options) -> None:
    Path("script.py").write_text(START + "print(os.environ['WORLD_SIZE'], sys.argv)\n")
    assert main([*options, "script.py", "--standalone"]) == 0
    assert capsys.readouterr() == ("2 ['script.py', '--standalone']\n", "")


def test_more_machines_than_one_are_refused(run: Run) -> None:
    assert run("", "--nnodes", "2") == (
        2,
        "",
        "error: cannot run script.py on more machines than one: all simulated ranks are in this process\n"
        "  --nnodes: 2, expected 1\n"
        "  try: python -m sim run --nproc 16 script.py, with as many ranks as all machines have together\n",
    )


def test_checks_of_a_script(run: Run) -> None:
    races = """
        dist.init_process_group()
        work = dist.all_reduce(x := torch.ones(2), async_op=True)
        x.tolist()
        work.wait()
    """
    assert run(races)[0] == 0
    code, _, err = run(races, "--check-races")
    assert code == 1
    assert "InFlightBufferRace: rank" in err
    assert "replay: python -m sim run --nproc 2 --seed 0 --check-races script.py" in err
    copies = """
        from torch.distributed.tensor import DTensor, Replicate, init_device_mesh
        DTensor.from_local(torch.ones(2) * rank, init_device_mesh("cpu", (2,)), [Replicate()])
    """
    assert run(copies)[0] == 0
    code, _, err = run(copies, "--check-replicas")
    assert code == 1
    assert "ReplicaMismatch: the copies of 'the tensor given to from_local'" in err
    names = """
        from torch.distributed.fsdp import fully_shard
        dist.init_process_group()
        model = torch.nn.Sequential()
        model.add_module(f"rank_{rank}", torch.nn.Linear(2, 2))
        fully_shard(model)(torch.ones(1, 2)).sum().backward()
        assert "--fail" not in sys.argv
    """
    code, _, err = run(names)
    assert code == 1
    assert "check_identity=False (--check-identity off) if they mean the same by other names" in err
    assert run(names, "--check-identity", "off")[0] == 0
    _, _, err = run(names, "--check-identity", "off", arguments=("--fail",))
    assert "replay: python -m sim run --nproc 2 --seed 0 --check-identity off script.py --fail" in err
