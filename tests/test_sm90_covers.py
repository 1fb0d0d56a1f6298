"""The calls that Hopper's quadratic kernels cover, and the tensor maps of their operands, on the host with a stand-in for the
driver. test_sm90.py runs the kernels."""

import itertools
import subprocess

import pytest
from common import compile_probe

PROBE = """
#include <cstdio>
#include <cstring>

#include "core/sm90/tensor_map.cpp"
#include "quadratic/sm90/covers.cu"

// In place of the driver and the runtime.
extern "C" {
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return ""; }
}
CUresult encode_for_probe(CUtensorMap* map, CUtensorMapDataType, cuuint32_t rank, void*, const cuuint64_t* extents,
                          const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t*, CUtensorMapInterleave,
                          CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  static int made = 0;
  std::memset(map, ++made, sizeof(*map));
  std::printf("%d: rank %u, %llu columns, token %llu bytes, box %u x %u, %d\\n", made, rank, (unsigned long long)extents[0],
              (unsigned long long)strides[0], box[0], box[1], swizzle == CU_TENSOR_MAP_SWIZZLE_64B ? 64 : 128);
  return CUDA_SUCCESS;
}
namespace fastmax {
void* driver_function(const char*) { return reinterpret_cast<void*>(encode_for_probe); }
CUcontext current_context() { return nullptr; }
}  // namespace fastmax

using namespace fastmax;

void maps() {
  alignas(16) static uint16_t data[64];
  for (const int columns : {32, 8, 96, 64, 128}) {
    const TokenTensor x{data, {4096, 1024, columns}, 2, 4, 16, columns, MathMode::kBF16};
    int again = 0;
    for (int i = 0; i < 2; ++i) {
      const CUtensorMap map = tensor_map(x, 64, panel_cols((columns + 31) / 32 * 32));
      again += *reinterpret_cast<const unsigned char*>(&map);
    }
    std::printf("%d", again);
    std::puts("");
  }
  const TokenTensor x{data, {4096, 1024, 64}, 2, 4, 16, 64, MathMode::kBF16};
  tensor_map(x, 64, 32);  // of other boxes
  tensor_map(x, 128);
}

// Of calls without options: what covers their backward, and the order and the workspace of the one kernel.
void fused() {
  AttentionParams p{};
  p.math = MathMode::kBF16, p.sm_arch = 90, p.sm_count = 132;
  int causal;
  while (std::scanf("%d %d %d %d %d %d %d %f", &p.b, &p.h, &p.hk, &p.n, &p.m, &p.head_dim_qk, &causal, &p.a1) == 8) {
    p.d = p.dv = p.head_dim_v = p.head_dim_qk, p.causal = causal != 0;
    p.q_stride = p.k_stride = p.v_stride = {int64_t{1} << 36, int64_t{1} << 30, p.d};
    if (covers_quadratic_fused_sm90(p, Direction::kForward) || covers_flash_fused_sm90(p, Direction::kForward)) return;
    const bool one = covers_quadratic_fused_sm90(p, Direction::kBackward);
    if (one != (covers_flash_fused_sm90(p, Direction::kBackward) && sums_divide_grad_o(p))) return;
    const KeyBlockOrder order = KeyBlockOrder::of(p);
    const FusedBwdWorkspace at(p, 1000, /*scales_grad_o=*/true);
    std::printf("%d %d %zu", one, order.heads_per_group, at.bytes - 1000);
    for (int i = 0; i < order.work_tiles() && order.work_tiles() < 100; ++i) {
      std::printf(" %d.%d", order.work_tile(i).head, order.work_tile(i).row_block);
    }
    std::puts("");
  }
}

int main(int count, char** arguments) {
  if (count > 1 && arguments[1][0] == 'f') return fused(), 0;
  if (count > 1) return maps(), 0;
  static const float decay = -1.f;
  static const int32_t bound = 0;
  AttentionParams p{};
  p.b = p.h = p.hk = 2, p.n = p.m = 64, p.sm_count = 132;
  int math, window, bounds, decays, expanded, backward;
  while (std::scanf("%d %d %d %d %d %d %d %d", &p.sm_arch, &p.head_dim_qk, &math, &window, &bounds, &decays, &expanded,
                    &backward) == 8) {
    p.math = static_cast<MathMode>(math), p.d = p.dv = p.head_dim_v = p.head_dim_qk, p.window = window != 0;
    p.k_start = {bounds ? &bound : nullptr, {}}, p.log_decay = decays ? &decay : nullptr;
    p.q_stride = p.k_stride = p.v_stride = {int64_t{2} * 64 * p.d, int64_t{64} * p.d, p.d};
    if (expanded) p.v_stride.head = 0;
    const Direction direction = backward ? Direction::kBackward : Direction::kForward;
    std::printf("%d%d%d %d%d%d%d\\n", covers_quadratic_sm90(p, direction), covers_quadratic_bounded_sm90(p, direction),
                covers_quadratic_decay_sm90(p, direction), covers_flash_sm90(p, direction),
                covers_flash_window_sm90(p, direction), covers_flash_bounded_sm90(p, direction),
                covers_flash_decay_sm90(p, direction));
  }
}
"""
BF16, FP16, TF32, FP32 = range(4)


@pytest.fixture(scope="module")
def probe():
    return compile_probe(PROBE)


@pytest.fixture(scope="module")
def covered(probe):
    """Returns covered(...), which lists the kinds of kernels of Fastmax and of softmax that take a call."""

    def run(head_dim, arch=90, math=BF16, window=0, bounds=0, decays=0, expanded=0, backward=0):
        line = f"{arch} {head_dim} {math} {window} {bounds} {decays} {expanded} {backward}"
        answer = subprocess.run([probe], input=line, check=True, capture_output=True, text=True).stdout.split()
        kinds = ("dense", "bounded", "decay"), ("dense", "window", "bounded", "decay")
        return tuple(
            {kind for kind, bit in zip(names, bits, strict=True) if bit == "1"}
            for names, bits in zip(kinds, answer, strict=True)
        )

    return run


@pytest.mark.parametrize("backward", [0, 1])
def test_head_dims(backward, covered):
    for head_dim in (32, 64, 96, 128):
        assert covered(head_dim, backward=backward) == ({"dense"}, {"dense"})
        of_fastmax, of_softmax = covered(head_dim, bounds=1, backward=backward)
        assert of_fastmax == {"bounded"} and "bounded" in of_softmax
        assert covered(head_dim, decays=1, backward=backward) == ({"decay"}, {"decay"})
        assert "window" in covered(head_dim, window=1, backward=backward)[1]
        assert covered(head_dim, math=FP16, backward=backward) == (set(), set() if backward else {"dense"})
    assert covered(256, backward=backward) == (set(), set())


def test_what_is_left(covered):
    nothing = set(), set()
    options = dict(bounds=(0, 1), decays=(0, 1), backward=(0, 1))
    for values in itertools.product(*options.values()):
        call = dict(zip(options, values, strict=True))
        for head_dim in (32, 64, 96, 128):
            assert covered(head_dim, arch=100, **call) == covered(head_dim, arch=80, **call) == nothing
            assert covered(head_dim, expanded=1, **call) == nothing
            assert covered(head_dim, math=TF32, **call) == covered(head_dim, math=FP32, **call) == nothing


def test_tensor_maps(probe):
    """Panels have 32 columns in the 64-byte swizzle and 64 in the 128-byte one. Maps are cached, and differ for other boxes."""
    printed = subprocess.run([probe, "maps"], check=True, capture_output=True, text=True).stdout.splitlines()
    assert printed == [
        "1: rank 4, 32 columns, token 64 bytes, box 32 x 64, 64",
        "2",
        "2: rank 4, 8 columns, token 16 bytes, box 32 x 64, 64",
        "4",
        "3: rank 4, 96 columns, token 192 bytes, box 32 x 64, 64",
        "6",
        "4: rank 4, 64 columns, token 128 bytes, box 64 x 64, 128",
        "8",
        "5: rank 4, 128 columns, token 256 bytes, box 64 x 64, 128",
        "10",
        "6: rank 4, 64 columns, token 128 bytes, box 32 x 64, 64",
        "7: rank 4, 64 columns, token 128 bytes, box 64 x 128, 128",
    ]


@pytest.fixture(scope="module")
def fused(probe):
    """Returns fused(...), which tells whether the backward is one kernel, how many heads run at once, the bytes beside the
    workspace of two kernels, and the first items, like (head, block of keys)."""

    def run(b, h, n, m=None, hk=None, head_dim=128, causal=True, a1=1.0):
        line = f"{b} {h} {hk or h} {n} {m or n} {head_dim} {int(causal)} {a1}"
        answer = subprocess.run([probe, "fused"], input=line, check=True, capture_output=True, text=True).stdout.split()
        one, heads, bytes_, *items = answer
        return one == "1", int(heads), int(bytes_), [tuple(map(int, item.split("."))) for item in items]

    return run


def test_where_the_backward_is_one_kernel(fused):
    for b, h, n, more in (
        (8, 16, 4096, {}),
        (2, 16, 16384, {}),
        (8, 16, 4096, dict(hk=4)),
        (32, 16, 2048, {}),
        (32, 16, 1024, dict(causal=False)),
        (1, 16, 64, dict(m=2048)),
        (8, 64, 4096, dict(head_dim=32)),
        (8, 32, 4096, dict(head_dim=64)),
        (8, 32, 4096, dict(head_dim=64, a1=-1e11)),
        (8, 16, 4096, dict(a1=1e-13)),
    ):
        assert fused(b, h, n, **more)[0]
    for b, h, n, more in (
        (8, 16, 4096, dict(head_dim=96)),
        (32, 16, 63, dict(m=2048)),  # sums of grad_q would be whole tiles
        (32, 64, 1024, dict(head_dim=32)),
        (32, 32, 1024, dict(head_dim=64)),
        (32, 16, 1024, {}),  # rounding them would take as long as is saved
        (32, 16, 300, dict(m=1000, causal=False)),
        (1, 4, 4096, {}),  # fewer blocks of keys than multiprocessors
        (1, 8, 4096, dict(causal=False)),  # or than two rounds of them
        (8, 32, 4096, dict(head_dim=64, a1=1e-13)),  # grad_o by sums of such weights would leave the range of floats
        (8, 64, 4096, dict(head_dim=32, a1=-1e13)),
    ):
        assert not fused(b, h, n, **more)[0]


def test_sums_of_a_fused_backward_take_less_than_its_queries(fused):
    """The queries take 16 bits each for q, o, grad_o and grad_q of head dim 128; the sums take fp32 for whole tiles of 64
    queries, and counters."""
    for n in (64, 65, 100, 128, 129, 1000, 4096):
        bytes_ = fused(4, 16, n, m=8192, causal=False)[2]
        assert 64 * n * 128 * 4 <= bytes_ < 64 * 4 * n * 128 * 2 + 1024
        divided = 64 * n * 32 * 2  # grad_o, by the sums of weights
        bytes_ = fused(4, 16, n, m=8192, head_dim=32, causal=False)[2]
        assert 64 * n * 32 * 4 <= bytes_ - divided < 64 * 4 * n * 32 * 2 + 1024


def test_order_of_a_fused_backward(fused):
    """As many heads run at once as L2 holds, block by block, and every block of every head runs once."""
    assert [fused(8, 16, 4096, causal=causal)[1] for causal in (True, False)] == [8, 4]
    assert [fused(8, 16, n)[1] for n in (1024, 16384, 1 << 20)] == [32, 2, 1]
    assert fused(8, 16, 4096, hk=4)[1] == 2
    assert [fused(8, 64, 4096, head_dim=32, causal=causal)[1] for causal in (True, False)] == [32, 16]
    assert fused(1, 9, 4096, m=4200)[1] == 5, "groups of about the same size"
    _, at_once, _, items = fused(1, 5, 16384, m=300)
    assert at_once == 2
    assert items == [(h, block) for group in ((0, 1), (2, 3), (4,)) for block in range(3) for h in group]
