"""`hbm_traffic` against numbers computed by hand."""

import subprocess

import pytest
import torch
from common import compile_probe

from fastmax import hbm_traffic
from fastmax.testing import reference
from fastmax.traffic import chunk_length, tile_rows

BF16 = {"dtype": torch.bfloat16}
FP32 = {"dtype": torch.float32}


# d = 128, two bytes an element: T d = 65536, 131072, 262144, 524288 numbers, T^2 = 2^18, 2^20, 2^22, 2^24.
@pytest.mark.parametrize(
    "seqlen, standard, once, tiles, linear, linear_p1",
    [
        # (4 T d + 4 T^2) 2 | 4 T d 2 + 4 T | (2 T d + 2 (T / 128) T d) 2 + 4 T | 4 T d 2 + 4 T + 2 S | as once
        # S = (128 136 / 2 + 256) 128 2 + 260 4 = 2294800
        (512, 2_621_440, 526_336, 1_312_768, 5_115_936, 526_336),
        (1024, 9_437_184, 1_052_672, 4_722_688, 5_642_272, 1_052_672),
        (2048, 35_651_584, 2_105_344, 17_833_984, 6_694_944, 2_105_344),
        (4096, 138_412_032, 4_210_688, 69_222_400, 8_800_288, 4_210_688),
    ],
)
def test_the_classic_table(seqlen, standard, once, tiles, linear, linear_p1):
    assert hbm_traffic(seqlen, 128, algorithm="standard").total == standard
    assert hbm_traffic(seqlen, 128, algorithm="standard", causal=True).total == standard
    for algorithm in ("flash", "quadratic"):
        for dtype in (torch.float16, torch.bfloat16):
            assert hbm_traffic(seqlen, 128, dtype, algorithm).total == once
            assert hbm_traffic(seqlen, 128, dtype, algorithm, block_size=seqlen).total == once
            assert hbm_traffic(seqlen, 128, dtype, algorithm, block_size=seqlen + 1, causal=True).total == once
            assert hbm_traffic(seqlen, 128, dtype, algorithm, block_size=128).total == tiles
    assert hbm_traffic(seqlen, 128, algorithm="linear", **BF16).total == linear
    for causal in (False, True):
        assert hbm_traffic(seqlen, 128, algorithm="linear", p=1, causal=causal, **BF16).total == linear_p1


def test_reads_and_writes():
    assert hbm_traffic(512, 128, algorithm="standard") == (1_441_792, 1_179_648)  # (3 T d + 2 T^2) 2, (T d + 2 T^2) 2
    assert hbm_traffic(512, 128) == (393_216, 133_120)  # 3 T d 2, T d 2 + 4 T
    assert hbm_traffic(512, 128, **FP32) == (786_432, 264_192)
    assert hbm_traffic(512, 128, block_size=64) == (2_228_224, 133_120)  # (T d + 2 8 T d) 2
    assert hbm_traffic(512, 128, block_size=64, causal=True) == (1_310_720, 133_120)  # R = 64 (1 + ... + 8) = 2304
    assert hbm_traffic(100, 64, block_size=64) == (64_000, 13_200)  # two blocks: (T d + 2 2 T d) 2
    assert hbm_traffic(100, 64, block_size=64, causal=True) == (54_784, 13_200)  # R = 64 + 100


def test_linear():
    # bf16: two, and no state: a single chunk.
    assert hbm_traffic(1024, 128, algorithm="linear", causal=True, **BF16) == (786_432, 266_240)
    # Four chunks of 1024, three states; keys read 4096 + 3072: (T d + 2 7168 d) 2 + 3 S, T d 2 + 4 T + 3 S.
    assert hbm_traffic(4096, 128, algorithm="linear", causal=True, **BF16) == (11_602_992, 7_949_360)
    # One more token, one more chunk.
    assert hbm_traffic(4097, 128, algorithm="linear", causal=True, **BF16).written == 4097 * 256 + 4 * 4097 + 4 * 2_294_800
    # float32, d = 64: S = (64 72 / 2 + 128) 64 4 + 132 4 = 623120; chunks of 512.
    assert hbm_traffic(1000, 64, algorithm="linear", **FP32) == (768_000 + 623_120, 256_000 + 4_000 + 623_120)
    assert hbm_traffic(1000, 64, algorithm="linear", causal=True, **FP32).written == 256_000 + 4_000 + 623_120
    # bf16: chunks of 256, three states of (2304 + 128) 64 2 + 528.
    assert hbm_traffic(1000, 64, algorithm="linear", causal=True, **BF16).written == 128_000 + 4_000 + 3 * 311_824
    # d = 16 and 20 run as 32: S = (32 40 / 2 + 64) 32 2 + 68 4.
    assert hbm_traffic(100, 16, algorithm="linear", **BF16) == (9_600 + 45_328, 3_200 + 400 + 45_328)
    assert hbm_traffic(100, 20, algorithm="linear", **BF16) == (12_000 + 45_328, 4_000 + 400 + 45_328)
    # float16: copies of q, k and v in float32 are written (3 T d 4) and read in their place.
    assert hbm_traffic(512, 128, algorithm="linear") == (393_216 + 786_432 + 4_588_560, 786_432 + 133_120 + 4_588_560)
    assert hbm_traffic(512, 128, algorithm="linear", p=1) == (393_216 + 786_432, 786_432 + 133_120)


def test_gates():
    # A float32 for each key that is read.
    causal = {"causal": True, "log_input_gate": True}
    for algorithm in ("flash", "quadratic"):
        assert hbm_traffic(512, 128, algorithm=algorithm, **causal) == (393_216 + 2_048, 133_120)
        with_blocks = hbm_traffic(512, 128, algorithm=algorithm, causal=True, block_size=128)
        keys = 128 + 256 + 384 + 512
        assert hbm_traffic(512, 128, algorithm=algorithm, block_size=128, **causal).read == with_blocks.read + 4 * keys
    for options, keys in (({}, 4096 + 3 * 1024), ({"p": 1}, 4096), ({"state": True}, 2 * 4096)):
        options = {"algorithm": "linear", "causal": True} | options | BF16
        plain = hbm_traffic(4096, 128, **options)
        assert hbm_traffic(4096, 128, log_input_gate=True, **options) == (plain.read + 4 * keys, plain.written)
    window = {"algorithm": "quadratic", "causal": True, "exact_window": 100}
    plain = hbm_traffic(512, 128, **window)
    assert hbm_traffic(512, 128, log_input_gate=True, **window) == (plain.read + 4 * 412, plain.written)


def test_decays():
    # T d 2 = 131072 a tensor; sums of decays 8 T written, 16 T read with the decays themselves, twice, and 4 T of first keys.
    for algorithm in ("flash", "quadratic"):
        assert hbm_traffic(512, 128, algorithm=algorithm, causal=True, log_decay=True) == (393_216 + 10_240, 133_120 + 4_096)
    plain = hbm_traffic(4096, 128, algorithm="linear", causal=True, **BF16)
    decayed = hbm_traffic(4096, 128, algorithm="linear", causal=True, log_decay=True, **BF16)
    copies = 3 * 1024 * 128 * 2  # of the values of all chunks but the last
    assert decayed == (plain.read + 20 * 4096 + copies, plain.written + 8 * 4096 + copies)
    plain = hbm_traffic(4096, 128, algorithm="linear", causal=True, p=1)
    decayed = hbm_traffic(4096, 128, algorithm="linear", causal=True, p=1, log_decay=True)
    assert decayed == (plain.read + 20 * 4096 + 4096 * 512, plain.written + 8 * 4096 + 4096 * 512)  # float16: as float32


def test_packed_sequences():
    packed = {"cu_seqlens": (0, 0, 100, 512)}
    for algorithm in ("flash", "quadratic"):
        assert hbm_traffic(512, 128, algorithm=algorithm, causal=True, **packed) == (393_216 + 2_048, 133_120)
        assert hbm_traffic(512, 128, algorithm=algorithm, **packed) == (393_216 + 4_096, 133_120)
        both = hbm_traffic(512, 128, algorithm=algorithm, causal=True, log_decay=True, **packed)
        assert both == hbm_traffic(512, 128, algorithm=algorithm, causal=True, log_decay=True), (
            "the first keys are there already"
        )
    plain = hbm_traffic(4096, 64, algorithm="linear", causal=True, **BF16)
    assert hbm_traffic(4096, 64, algorithm="linear", causal=True, cu_seqlens=[0, 4096], **BF16).read == plain.read + 4 * 4096


@pytest.mark.parametrize("window", [None, 1, 30, (5, -1), (-1, 3), (0, 70)])
@pytest.mark.parametrize("bounds", [None, (0, 100), (0, 0, 37, 38, 64, 100, 100)])
@pytest.mark.parametrize("causal", [False, True])
def test_keys_that_a_block_sees(causal, bounds, window):
    q = torch.zeros(1, 1, 100, 1)
    cu_seqlens = None if bounds is None else torch.tensor(bounds)
    visible = reference.visible_pairs(q, q, causal=causal, cu_seqlens=cu_seqlens, window=window).broadcast_to(1, 1, 100, 100)
    for rows in (1, 7, 64, 100, 512):
        keys = sum(int(block.any(0).sum()) for block in visible[0, 0].split(rows))
        counted = hbm_traffic(100, 64, causal=causal, window=window, cu_seqlens=bounds, block_size=rows)
        assert counted.read == 100 * 128 + 2 * keys * 128 + (0 if bounds is None else 400 if causal else 800), rows


def test_windows_are_not_seen_behind_a_cache():
    assert hbm_traffic(512, 128, window=10, causal=True) == hbm_traffic(512, 128, causal=True)


def test_exact_window():
    merge = 412 * (128 * 2 + 4)
    for algorithm in ("quadratic", "linear"):
        near = hbm_traffic(512, 128, algorithm="flash", causal=True, **BF16)
        far = hbm_traffic(412, 128, algorithm=algorithm, causal=True, **BF16)
        exact = hbm_traffic(512, 128, algorithm=algorithm, causal=True, exact_window=100, **BF16)
        assert exact == (near.read + far.read + 2 * merge, near.written + far.written + merge)
        exact = hbm_traffic(512, 128, algorithm=algorithm, exact_window=100, **BF16)
        assert exact == (near.read + 2 * far.read + 4 * merge, near.written + 2 * far.written + 2 * merge)
        decay = {"causal": True, "log_decay": True} | BF16
        near, far = hbm_traffic(512, 128, algorithm="flash", **decay), hbm_traffic(412, 128, algorithm=algorithm, **decay)
        exact = hbm_traffic(512, 128, algorithm=algorithm, exact_window=100, **decay)
        assert exact == (near.read + far.read + 2 * merge + 16 * 100, near.written + far.written + merge + 8 * 100)
        near = hbm_traffic(512, 128, algorithm="flash", causal=True, **BF16)
        for window in (512, 1000):  # softmax attention
            assert hbm_traffic(512, 128, algorithm=algorithm, causal=True, exact_window=window, **BF16) == near
    packed = hbm_traffic(512, 128, algorithm="linear", exact_window=100, cu_seqlens=(0, 9, 512), **BF16)
    plain = hbm_traffic(512, 128, algorithm="linear", exact_window=100, **BF16)
    assert packed == (plain.read + 8 * 512 + 2 * 4 * 412, plain.written), "the far parts are causal"


def test_state():
    # R (d + 1) 4 of the state: R = 1 + 128 + 8256. Four chunks that read a state each, whose keys are all summed.
    state = 8_385 * 129 * 4
    expected = (4096 * 256 * 5 + 4 * 2_294_800 + state, 4096 * 256 + 4 * 4096 + 4 * 2_294_800 + state)
    assert hbm_traffic(4096, 128, algorithm="linear", causal=True, state=True, **BF16) == expected
    assert hbm_traffic(1, 128, algorithm="linear", causal=True, state=True, **BF16).written == 256 + 4 + 2_294_800 + state
    plain = hbm_traffic(4096, 128, algorithm="linear", causal=True, p=1, **BF16)
    # 16 chunks of 256, each a sum and a state; keys read twice.
    state = 129 * 129 * 4 + 16 * (128 * 128 * (4 + 2) + 2 * 257 * 4)
    assert hbm_traffic(4096, 128, algorithm="linear", causal=True, p=1, state=True, **BF16) == (
        plain.read + state + 2 * 4096 * 128 * 2,
        plain.written + state,
    )
    # No more than a state, one chunk's keys and a snapshot beyond the call without.
    plain = hbm_traffic(65536, 64, algorithm="linear", causal=True, **BF16)
    assert hbm_traffic(65536, 64, algorithm="linear", causal=True, state=True, **BF16).total < 1.01 * plain.total


@pytest.mark.parametrize("head_dim", [16, 64, 96, 128, 256])
def test_states_outgrow_nothing(head_dim):
    """The bytes of states are linear in the tokens, unlike those of scores: twice the tokens take at most twice the bytes."""
    for causal in (False, True):
        half, whole = (hbm_traffic(n, head_dim, torch.bfloat16, "linear", causal=causal).total for n in (2**16, 2**17))
        assert half < whole <= 2.1 * half
    half, whole = (hbm_traffic(n, head_dim, torch.bfloat16, "standard").total for n in (2**16, 2**17))
    assert whole > 3.9 * half


def test_tile_rows():
    assert [tile_rows(d) for d in (16, 64, 65, 128, 256)] == [128, 128, 64, 64, 128]
    assert [tile_rows(d, torch.bfloat16) for d in (1, 64, 128, 129, 256)] == [128] * 5
    assert [tile_rows(d, torch.float32) for d in (16, 128, 256)] == [64, 64, 128]


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"seqlen": 0}, ValueError, "seqlen must be at least 1, got 0"),
        ({"seqlen": 2.0}, TypeError, r"seqlen must be an int, got 2.0 \(float\)"),
        ({"head_dim": 0}, ValueError, "head_dim must be at least 1, got 0"),
        ({"head_dim": 257}, ValueError, "head_dim must be at most 256, .* got 257"),
        ({"head_dim": 129, "algorithm": "linear", "p": 1}, ValueError, "head_dim must be at most 128 for p = 1, got 129"),
        ({"dtype": torch.float64}, TypeError, "dtype must be float16, bfloat16 or float32, got torch.float64"),
        ({"dtype": "float16"}, TypeError, "dtype must be float16, .* got 'float16'"),
        ({"algorithm": "auto"}, ValueError, "algorithm must be one of 'standard', 'flash', 'quadratic', 'linear', got 'auto'"),
        ({"causal": 1}, TypeError, "causal must be a bool"),
        ({"block_size": 0}, ValueError, "block_size must be at least 1, got 0"),
        ({"block_size": 64.0}, TypeError, "block_size must be an int, got 64.0"),
        ({"block_size": 64, "algorithm": "linear"}, ValueError, 'block_size must be None for algorithm="linear", .* got 64'),
        ({"p": 3}, ValueError, "p must be 1 or 2, got 3"),
        ({"log_decay": 1}, TypeError, r"log_decay must be a bool, got 1 \(int\)"),
        ({"log_decay": True}, ValueError, "log_decay needs causal=True"),
        ({"log_input_gate": 1}, TypeError, r"log_input_gate must be a bool, got 1 \(int\)"),
        ({"log_input_gate": True}, ValueError, "log_input_gate needs causal=True"),
        (
            {"log_decay": True, "causal": True, "algorithm": "standard"},
            ValueError,
            "log_decay is for 'flash', 'quadratic', 'linear', got algorithm=\"standard\"",
        ),
        ({"cu_seqlens": (0, 8), "algorithm": "linear"}, ValueError, "cu_seqlens without causal runs on"),
        ({"cu_seqlens": (0, 8), "algorithm": "standard"}, ValueError, "cu_seqlens is for"),
        ({"cu_seqlens": (0, 4.0, 8)}, TypeError, "cu_seqlens must hold ints"),
        ({"cu_seqlens": (0, 5, 4, 8)}, ValueError, "cu_seqlens must go from 0 to seqlen = 8 without falling"),
        ({"cu_seqlens": (0, 9)}, ValueError, "cu_seqlens must go from 0 to seqlen = 8"),
        ({"window": 0}, ValueError, "window must be an int of at least 1"),
        ({"window": 3, "algorithm": "quadratic"}, ValueError, "window is for 'flash'"),
        ({"exact_window": 3}, ValueError, "exact_window is for 'quadratic', 'linear'"),
        ({"exact_window": -1, "algorithm": "linear"}, ValueError, "exact_window must be at least 0, got -1"),
        (
            {"exact_window": 3, "algorithm": "quadratic", "block_size": 4},
            ValueError,
            "exact_window must be 0 with block_size=4, got 3",
        ),
        (
            {"exact_window": 3, "algorithm": "linear", "causal": True, "state": True},
            ValueError,
            "exact_window must be 0 with state=True, got 3",
        ),
        ({"state": True, "algorithm": "quadratic", "causal": True}, ValueError, "state is for 'linear'"),
        ({"state": True, "algorithm": "linear"}, ValueError, "state needs causal=True"),
    ],
    ids=lambda x: str(x) if isinstance(x, dict) else "",
)
def test_errors(options, error, message):
    with pytest.raises(error, match=message):
        hbm_traffic(**{"seqlen": 8, "head_dim": 8} | options)


PROBE = """
#include <cstdio>
#include "linear/order2/state_format.h"
#include "quadratic/portable/tile_config.h"
using namespace fastmax;

template <class Math, int kHeadDim>
void row(const char* dtype) {
  const bool bf16 = Math::kMode == MathMode::kBF16;
  const long long state = state_words(kHeadDim, kHeadDim, 2) * (bf16 ? 4 : 8) + state_sums(kHeadDim, kHeadDim) * 4ll;
  const int rows = QuadraticFwdTile<Math, kHeadDim>::kRows;
  std::printf("%s %d %d %lld %d\\n", dtype, kHeadDim, chunk_length(kHeadDim, 2, bf16), state, rows);
}
template <class Math>
void rows(const char* dtype) {
  row<Math, 32>(dtype), row<Math, 64>(dtype);
  row<Math, 96>(dtype), row<Math, 128>(dtype), row<Math, 256>(dtype);
}
int main() { rows<Bf16>("bfloat16"), rows<Fp16>("float16"), rows<Fp32>("float32"); }
"""


def test_sizes_are_those_of_the_cuda_sources():
    """The chunk lengths, bytes of a state and rows of a tile are compared with those compiled from csrc/."""
    probe = compile_probe(PROBE, device_code=True)
    lines = [line.split() for line in subprocess.run([probe], check=True, capture_output=True, text=True).stdout.splitlines()]
    assert len(lines) == 15
    for name, head_dim, chunk, state, rows in lines:
        dtype, d, chunk = getattr(torch, name), int(head_dim), int(chunk)
        assert chunk_length(d, dtype) == chunk
        assert tile_rows(d, dtype) == int(rows)
        one, two = (hbm_traffic(count * chunk, d, dtype, "linear", causal=True) for count in (1, 2))
        widened = 3 * chunk * d * 4 if dtype == torch.float16 else 0
        assert two.written - one.written == int(state) + chunk * d * dtype.itemsize + 4 * chunk + widened
