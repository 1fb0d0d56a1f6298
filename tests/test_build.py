"""csrc/build.py and setup.py without a compiler: what they would build, and the message that says why they cannot."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from common import load_build

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def build(monkeypatch):
    monkeypatch.delenv("FASTMAX_CUDA_ARCHS", raising=False)
    return load_build()


def script(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def toolkit(tmp_path, monkeypatch):
    """A CUDA toolkit in name only, which CUDA_HOME points to."""
    home = tmp_path / "cuda"
    script(home / "bin/nvcc", "exit 1")
    (home / "lib64").mkdir()
    (home / "lib64/libcudart_static.a").touch()
    monkeypatch.setenv("CUDA_HOME", str(home))
    return home


@pytest.fixture
def no_cuda_home(monkeypatch):
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)


# ---- architectures


@pytest.mark.parametrize(
    "text, archs",
    [("90", (90,)), ("80,86 90", (80, 86, 90)), ("90;80, 90", (80, 90)), ("100", (100,)), ("", None), (" ", None)],
)
def test_parse_archs(text, archs, build):
    assert build.parse_archs(text) == (archs or build.DEFAULT_ARCHS)


@pytest.mark.parametrize("text", ["75", "sm_90", "9.0", "90a", "-90", "80,compute_90"])
def test_bad_archs_are_named(text, build):
    with pytest.raises(build.BuildError, match="numbers from 80 on") as error:
        build.parse_archs(text)
    assert repr(text.split(",")[-1]) in str(error.value)


def test_native_archs_are_those_of_the_devices(build, monkeypatch):
    devices = [(9, 0), (7, 5), (8, 0), (9, 0)]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(devices))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: devices[index])
    assert build.parse_archs("native") == (80, 90)
    devices[:] = [(7, 5)]
    with pytest.raises(build.BuildError, match="no CUDA device"):
        build.parse_archs("native")


def test_requested_archs_come_from_the_environment(build, monkeypatch):
    monkeypatch.setenv("FASTMAX_CUDA_ARCHS", "86,80")
    assert build.requested_archs() == (80, 86)
    monkeypatch.delenv("FASTMAX_CUDA_ARCHS")
    assert build.requested_archs() == build.DEFAULT_ARCHS == tuple(sorted(build.DEFAULT_ARCHS))


def test_arch_flags(build):
    """Sources outside the architecture folders are compiled for all architectures, and as PTX for the oldest, in one front-end
    run."""
    every = [
        "-gencode=arch=compute_80,code=sm_86",
        "-gencode=arch=compute_80,code=sm_90",
        "-gencode=arch=compute_80,code=compute_80",
    ]
    assert build.arch_flags(Path("portable/x.cu"), (86, 90)) == every
    assert build.arch_flags(Path("device.cu"), (86, 90)) == every
    every[1] = "-gencode=arch=compute_90,code=sm_90"
    folder = build.SOURCE_DIR / "linear/order1"
    assert folder in build.FRONT_ENDS
    assert build.arch_flags(folder / "portable/x.cu", (86, 90)) == every
    assert build.arch_flags(folder / "sm90/x.cu", (86, 90)) == ["-gencode=arch=compute_90a,code=sm_90a"]
    assert build.arch_flags(Path("sm120/x.cu"), (120,)) == ["-gencode=arch=compute_120a,code=sm_120a"]


def test_only_what_is_said_to_tells_architectures_apart(build):
    """In other sources a condition on the architecture would be decided for the oldest one."""
    asks = {
        path.relative_to(build.SOURCE_DIR).as_posix()
        for path in build.SOURCE_DIR.rglob("*.*")
        if path.suffix in (".h", ".cu") and re.search(r"__CUDA_ARCH__ *[<>=!]", path.read_text())
    }
    assert asks == {"linear/tile_config.h"}
    tiles = r"\b(Linear1|Sum|Walk|PairWalk)Tile\b"
    users = {path for path in build.sources(".cu", (90,)) if re.search(tiles, path.read_text())}
    assert users and all(path.is_relative_to(build.SOURCE_DIR / "linear/order1") for path in users)


@pytest.mark.parametrize("archs", [(90,), (86, 100), (80, 90)])
def test_a_device_that_can_load_the_probe_can_load_all_kernels(build, archs):
    """The probe has no code for a device that another source has none for."""
    oldest = {
        source: int(re.findall(r"code=compute_(\d+)", " ".join(build.arch_flags(source, archs)))[-1])
        for source in build.sources(".cu", archs)
        if build.own_arch(source) is None
    }
    assert oldest[build.SOURCE_DIR / "core/device.cu"] == max(oldest.values())


# ---- the ninja file


def edges(text):
    """Returns {output: (rule, inputs, extra flags)}."""
    found = {}
    for match in re.finditer(r"^build (\S+): (\S+)(.*)\n(?:  extra = (.*)\n)?", text, re.MULTILINE):
        found[match[1]] = match[2], match[3].split(), (match[4] or "").split()
    return found


def test_ninja_file_of_the_sources(build, toolkit):
    text = build.ninja_file((80, 90))
    found = edges(text)
    sources = sorted(build.SOURCE_DIR.rglob("*.cu"))
    sharded = [source for source in sources if "FASTMAX_MATH" in source.read_text()]
    assert len(sources) > 5 and 2 <= len(sharded) < len(sources)
    assert all(
        (len(build.shards(source)) > 1) == bool(re.search("FASTMAX_(SCORE|MATH)", source.read_text())) for source in sources
    )
    expected = set()
    for source in sources:
        shards = build.shards(source)
        modes = {shard.get("FASTMAX_MATH") for shard in shards}
        # Without products of matrices fp32 is one mode.
        accepted = [set(build.MATH_MODES), set(build.MATH_MODES) - {"Tf32"}] if source in sharded else [{None}]
        assert modes in accepted
        for shard in shards:
            name = build.object_name(source, shard)
            rule, inputs, extra = found[name]
            assert rule == "nvcc" and inputs == [str(source)]
            assert extra == build.arch_flags(source, (80, 90)) + [f"-D{macro}={value}" for macro, value in shard.items()]
            expected.add(name)
    for source in build.SOURCE_DIR.rglob("*.cpp"):
        assert found[build.object_name(source)] == ("cxx", [str(source)], [])
        expected.add(build.object_name(source))
    assert len(expected) == len(found) - 2, "no two sources make one object"
    assert {"bindings/attention.o", "linear/order1/portable/walk.bf16.o", "linear/order2/portable/read.bf16.o"} < expected
    assert {"quadratic/portable/fwd.softmax.table.bf16.o", "quadratic/sm90/bwd.polynomial.decay.o"} < expected
    rule, inputs, _ = found["libfastmax.so"]
    assert rule == "link" and set(inputs) == expected | {"stub/libtorch_cuda.so"}
    assert set(found) == expected | {"libfastmax.so", "stub/libtorch_cuda.so"}
    assert "-Wl,-soname,libtorch_cuda.so" in text
    assert "-Wl,-z,defs" in text, "a kernel that is missing shows at the link"
    assert text.count("-DFASTMAX_ARCHS='\"80 90\"'") == 2, "for both compilers"
    assert f"command = {toolkit}/bin/nvcc " in text and f"-L{toolkit}/lib64 -lcudart_static" in text
    assert "-DTORCH_TARGET_VERSION=0x020b" in text


def test_folders_of_architectures_are_left_out_of_other_builds(build, toolkit, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "SOURCE_DIR", tmp_path)
    (tmp_path / "sm90").mkdir()
    (tmp_path / "x.cu").write_text("")
    (tmp_path / "sm90/x.cu").write_text("// shards: FASTMAX_MATH\n")
    (tmp_path / "sm90/host.cpp").write_text("")
    assert set(edges(build.ninja_file((80, 86)))) == {"x.o", "libfastmax.so", "stub/libtorch_cuda.so"}
    found = edges(build.ninja_file((90,)))
    assert found["sm90/x.tf32.o"][2] == ["-gencode=arch=compute_90a,code=sm_90a", "-DFASTMAX_MATH=Tf32"]
    assert found["sm90/host.o"][0] == "cxx" and len(found) == 4 + len(build.MATH_MODES)
    for archs, times in [((80, 100), 0), ((80, 90), 2)]:
        assert build.ninja_file(archs).count("-DFASTMAX_HAS_SM90") == times, "for both compilers, where those sources are"
    (tmp_path / "sm100").mkdir()
    (tmp_path / "sm100/y.cu").write_text("")
    both = build.ninja_file((90, 100))
    assert both.count("-DFASTMAX_HAS_SM90 -DFASTMAX_HAS_SM100") == 2
    assert edges(both)["sm100/y.o"][2] == ["-gencode=arch=compute_100a,code=sm_100a"]


def test_shards_are_combinations(build, tmp_path):
    source = tmp_path / "x.cu"
    source.write_text("// One kernel.\n")
    assert build.shards(source) == [{}]
    source.write_text("// shards: A=x,y B=z,w\n// shards: A=v FASTMAX_MATH\nA<B>\n")
    expected = [{"A": a, "B": b} for a in "xy" for b in "zw"] + [{"A": "v", "FASTMAX_MATH": mode} for mode in build.MATH_MODES]
    assert build.shards(source) == expected


def test_kernels_that_hang_end_in_an_error_where_it_was_asked_for(build, toolkit):
    assert "FASTMAX_TRAP_DEADLOCKS" not in build.ninja_file((90,))
    assert build.ninja_file((90,), trap_deadlocks=True).count("-DFASTMAX_TRAP_DEADLOCKS") == 2


def test_kernels_are_compressed_as_it_was_asked_for(build, toolkit):
    assert "--compress-mode=size " in build.ninja_file((90,)), "what is installed"
    for mode in build.COMPRESSIONS:
        assert build.ninja_file((90,), compress=mode).count(f"--compress-mode={mode} ") == 1


@pytest.mark.parametrize("where", ["lib64", "lib", "targets/x86_64-linux/lib"])
def test_static_runtime_is_looked_for(where, build, toolkit):
    (toolkit / "lib64/libcudart_static.a").unlink()
    with pytest.raises(build.BuildError, match=r"libcudart_static\.a was not found under .*cuda"):
        build.ninja_file((80,))
    (toolkit / where).mkdir(parents=True, exist_ok=True)
    (toolkit / where / "libcudart_static.a").touch()
    assert f"-L{toolkit / where} " in build.ninja_file((80,))


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_ninja_reads_the_file_and_makes_the_stub(build, toolkit, tmp_path):
    (tmp_path / "stub").mkdir()
    (tmp_path / "build.ninja").write_text(build.ninja_file((80, 90)))
    ninja = [build.ninja_program(), "-C", str(tmp_path)]
    planned = subprocess.run([*ninja, "-n"], capture_output=True, text=True, check=True).stdout
    assert "link libfastmax.so" in planned and planned.count("nvcc ") == sum(
        rule == "nvcc" for rule, _, _ in edges(build.ninja_file((80, 90))).values()
    )
    subprocess.run([*ninja, "stub/libtorch_cuda.so"], capture_output=True, check=True)
    library = (tmp_path / "stub/libtorch_cuda.so").read_bytes()
    assert b"\0libtorch_cuda.so\0" in library and b"\0aoti_torch_get_current_cuda_stream\0" in library


# ---- register spills


BF16_64 = "_ZN7fastmax23quadratic_bwd_kv_kernelINS_4Bf16ELi64EEEvNS_9BwdParamsE"  # an exception
BF16_32 = "_ZN7fastmax23quadratic_bwd_kv_kernelINS_4Bf16ELi32EEEvNS_9BwdParamsE"
CLEAN = "_ZN7fastmax5cleanEv"


def report(kernel, arch, stores, loads):
    return (
        f"ptxas info    : Compiling entry function '{kernel}' for '{arch}'\n"
        f"ptxas info    : Function properties for {kernel}\n"
        f"    16 bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads\n"
        "ptxas info    : Used 255 registers, used 1 barriers\n"
    )


@pytest.mark.skipif(shutil.which("c++filt") is None, reason="exceptions are patterns of demangled names")
def test_spills_are_reported_but_for_the_exceptions(build, tmp_path):
    assert build.spills(tmp_path) == []
    text = "ptxas info    : 0 bytes gmem\n" + report(CLEAN, "sm_80", 0, 0) + report(BF16_64, "sm_80", 8, 4)
    (tmp_path / "linear").mkdir()
    (tmp_path / "linear/a.o.log").write_text(text)
    assert build.spills(tmp_path) == []
    text += report(BF16_32, "sm_80", 0, 4) + report(CLEAN, "sm_90", 0, 0) + report(BF16_32, "sm_90", 12, 16)
    (tmp_path / "b.bf16.o.log").write_text(text)
    first, second = build.spills(tmp_path)
    assert "sm_80" in first and "0 bytes stored, 4 loaded" in first
    assert (
        "sm_90" in second and "quadratic_bwd_kv_kernel<fastmax::Bf16, 32>" in second and "12 bytes stored, 16 loaded" in second
    )


def test_spill_exceptions_have_reasons_and_name_kernels(build):
    sources = "".join(source.read_text() for source in (*build.SOURCE_DIR.rglob("*.cu"), *build.SOURCE_DIR.rglob("*.h")))
    for pattern, reason in build.SPILL_EXCEPTIONS.items():
        assert len(reason.split()) >= 5
        assert re.search(r"<(fastmax::|float|__|\d)|_kernel\\\(", pattern)  # instances, or a kernel that has none
        for name in re.findall(r"[a-z]\w+_kernel", pattern):
            assert re.search(rf"__global__[^;{{]*\b{name}\(", sources), f"no kernel {name}"


@pytest.mark.parametrize("strict", [False, True], ids=["", "--fail-on-spills"])
def test_main_exits_with_1_for_spills_when_asked(strict, build, toolkit, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    ninja = script(tmp_path / "ninja", f"truncate -s 1536K {out}/libfastmax.so")
    monkeypatch.setattr(build, "ninja_program", lambda: str(ninja))
    arguments = ["build.py", "--archs", "90", "--out", str(out)] + ["--fail-on-spills"] * strict
    monkeypatch.setattr(sys, "argv", arguments)
    assert build.main() == 0
    assert capsys.readouterr().out.strip() == f"{out}/libfastmax.so: 1.5 MiB"
    (out / "x.o.log").write_text(report(BF16_32, "sm_90", 4, 4))
    assert build.main() == int(strict)
    assert "register spill: sm_90 " in capsys.readouterr().err


# ---- what is missing


def hide(build, monkeypatch, *programs):
    which = shutil.which
    monkeypatch.setattr(build.shutil, "which", lambda name: None if name in programs else which(name))


def assert_one_sentence(text, *words):
    assert text is not None and "\n" not in text and ". " not in text
    for word in words:
        assert word in text


def test_nothing_is_missing(build, toolkit, monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(build, "ninja_program", lambda: "ninja")
    assert build.missing() is None


def test_missing_nvcc(build, no_cuda_home, monkeypatch):
    hide(build, monkeypatch, "nvcc")
    assert_one_sentence(build.missing(), "nvcc was not found", "install the CUDA toolkit", "CUDA_HOME")


def test_cuda_home_that_is_not_there(build, tmp_path, monkeypatch):
    """If the toolkit that CUDA_HOME names was removed, the error is a missing nvcc and not a build that fails half way."""
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "gone"))
    hide(build, monkeypatch, "nvcc")
    assert_one_sentence(build.missing(), "CUDA_HOME", "bin/nvcc")


def test_missing_ninja(build, toolkit, tmp_path, monkeypatch):
    hide(build, monkeypatch, "ninja")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert_one_sentence(build.missing(), "ninja was not found", "pip install ninja")
    beside = script(tmp_path / "ninja", "exit 0")
    assert build.missing() is None and build.ninja_program() == str(beside)


def test_missing_torch(build, toolkit, monkeypatch):
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    assert_one_sentence(build.missing(), "PyTorch was not found", "headers")


def test_other_systems(build, monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert_one_sentence(build.missing(), "Linux only", "darwin")


def test_bad_archs_are_missing_too(build, toolkit, monkeypatch):
    monkeypatch.setattr(build, "ninja_program", lambda: "ninja")
    monkeypatch.setenv("FASTMAX_CUDA_ARCHS", "70")
    assert_one_sentence(build.missing(), "numbers from 80 on", "'70'")


def test_cuda_home_follows_nvcc_on_the_path(build, no_cuda_home, tmp_path, monkeypatch):
    """The toolkit is where nvcc says it is, even if the nvcc on the path is a wrapper elsewhere."""
    home = tmp_path / "opt/cuda-13"
    home.mkdir(parents=True)
    nvcc = script(tmp_path / "bin/nvcc", f"echo '#$ TOP={home}' >&2")
    monkeypatch.setattr(build.shutil, "which", lambda name: str(nvcc))
    assert build.cuda_home() == home
    script(nvcc, "exit 1")
    assert build.cuda_home() == tmp_path


def test_failed_compilation_is_one_sentence(build, toolkit, tmp_path, monkeypatch, capsys):
    ninja = script(tmp_path / "ninja", "exit 3")
    monkeypatch.setattr(build, "ninja_program", lambda: str(ninja))
    monkeypatch.setattr(sys, "argv", ["build.py", "--archs", "80", "--out", str(tmp_path / "out"), "--jobs", "2"])
    assert build.main() == 1
    error = capsys.readouterr().err
    assert error.startswith("fastmax: the compilation failed") and f"-C {tmp_path}/out -j 2" in error
    monkeypatch.setattr(sys, "argv", ["build.py", "--archs", "11"])
    assert build.main() == 1
    assert capsys.readouterr().err.startswith("fastmax: architectures must be numbers")


# ---- setup.py


def run_setup(tmp_path, **variables):
    """Runs `setup.py --version` with an empty PATH."""
    (tmp_path / "empty").mkdir(exist_ok=True)
    dropped = ("CUDA_HOME", "CUDA_PATH", "FASTMAX_BUILD_CUDA", "FASTMAX_CUDA_ARCHS")
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    environment |= {"PATH": str(tmp_path / "empty"), **variables}
    command = [sys.executable, "-W", "ignore", "setup.py", "--version"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout.strip(), done.stderr.strip()


def test_setup_without_nvcc_says_so_and_goes_on(tmp_path):
    status, out, error = run_setup(tmp_path)
    assert status == 0 and re.fullmatch(r"\d+\.\d+\.\d+", out.splitlines()[-1])
    assert error.startswith("fastmax: installing without CUDA kernels: nvcc was not found")
    assert_one_sentence(error, "install the CUDA toolkit")


def test_setup_told_not_to_build_says_nothing(tmp_path):
    assert run_setup(tmp_path, FASTMAX_BUILD_CUDA="0")[::2] == (0, "")


def test_setup_told_to_build_fails_without_nvcc(tmp_path):
    status, _, error = run_setup(tmp_path, FASTMAX_BUILD_CUDA="1")
    assert status == 1
    assert_one_sentence(error, "fastmax: FASTMAX_BUILD_CUDA=1, but nvcc was not found", "install the CUDA toolkit")


@pytest.mark.parametrize("value", ["2", "yes"])
def test_setup_names_a_bad_value(value, tmp_path):
    status, _, error = run_setup(tmp_path, FASTMAX_BUILD_CUDA=value)
    assert status == 1
    assert_one_sentence(error, "FASTMAX_BUILD_CUDA must be 0 or 1 or unset", repr(value))


def test_setup_names_bad_archs(toolkit, tmp_path):
    script(tmp_path / "empty/ninja", "exit 0")
    variables = {"CUDA_HOME": str(toolkit), "FASTMAX_CUDA_ARCHS": "sm_90"}
    assert run_setup(tmp_path, FASTMAX_BUILD_CUDA="1", CUDA_HOME=str(toolkit))[0] == 0
    status, _, error = run_setup(tmp_path, FASTMAX_BUILD_CUDA="1", **variables)
    assert status == 1
    assert_one_sentence(error, "architectures must be numbers from 80 on", "'sm_90'")


def test_serialised_products_are_reported(build, tmp_path):
    (tmp_path / "a_sm90.o.log").write_text(report(CLEAN, "sm_90a", 0, 0))
    assert build.serialised(tmp_path) == []
    (tmp_path / "quadratic").mkdir()
    (tmp_path / "quadratic/b_sm90.o.log").write_text(
        report(CLEAN, "sm_90a", 0, 0)
        + "ptxas info    : (C7513) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ...\n"
        + "ptxas warning : (C7508) 'setmaxnreg' ignored\n"
    )
    first, second = build.serialised(tmp_path)
    assert first.startswith("quadratic/b_sm90.o.log: ") and "C7513" in first and "C7508" in second
