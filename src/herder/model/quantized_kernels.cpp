// Products with weights of 4 or 8 bits as quantized_weight.py packs them: of few rows straight from
// the packed words, each read once; for many rows the matrix is put together first.
//
// Legend: M rows, I inputs, O outputs, G groups of inputs that share a scale, L lanes. A row of the
// weight is int32 words: the codes of BLOCK inputs after BLOCK, then one word a group, its scale in the
// low half and its least value in the high half, both bf16. value = least + scale * code.
//
// Neighbours lie in neighbouring words at the same place, so that a vector of words gives LANES of
// them by one mask.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/bit_cast.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>

namespace {

using at::Tensor;

constexpr int64_t LANES = 8;
constexpr int64_t STEPS = 4;  // vectors of a run
constexpr int64_t RUN = STEPS * LANES;  // inputs that have one scale, whatever the group
constexpr int64_t BLOCK = 64;
constexpr int64_t WORDS_PER_TASK = 2048;
constexpr int64_t PREFETCH_WORDS = 256;

using Floats = float __attribute__((vector_size(LANES * sizeof(float))));
using Words = uint32_t __attribute__((vector_size(LANES * sizeof(uint32_t))));
using Signed = int32_t __attribute__((vector_size(LANES * sizeof(int32_t))));

template <typename Vector, typename T_>
inline Vector load(const T_* from) {
  Vector vector;
  std::memcpy(&vector, from, sizeof(vector));
  return vector;
}

inline float low_half(uint32_t word) { return c10::bit_cast<float>(word << 16); }
inline float high_half(uint32_t word) { return c10::bit_cast<float>(word & 0xffff0000u); }

// A weight's rows, and where in them things are.
template <int BITS>
struct Rows {
  static constexpr int64_t RUNS_OF_WORDS = 8 / BITS;  // runs that share LANES words
  int64_t inputs, outputs, padded, words, groups, runs_of_group;
  const uint32_t* first;

  Rows(const Tensor& weight, int64_t inputs, int64_t group)
      : inputs(inputs), outputs(weight.size(0)), padded((inputs + BLOCK - 1) / BLOCK * BLOCK),
        words(padded * BITS / 32), groups((inputs + group - 1) / group), runs_of_group(group / RUN),
        first(reinterpret_cast<const uint32_t*>(weight.const_data_ptr<int32_t>())) {
    TORCH_CHECK(weight.size(1) == words + groups, "a weight of ", inputs, " inputs, ", BITS,
                " bits and groups of ", group, " has ", words + groups, " words a row, not ",
                weight.size(1));
  }

  int64_t runs() const { return (inputs + RUN - 1) / RUN; }
  const uint32_t* row(int64_t o) const { return first + o * (words + groups); }
  const uint32_t* groups_of(int64_t o) const { return row(o) + words; }
  static int place(int64_t run, int64_t step) {
    return BITS * static_cast<int>(run % RUNS_OF_WORDS * STEPS + step);
  }
};

// The codes of LANES neighbours, 2^place too large: exact in fp32, and x is as much smaller. In the
// highest place a code would be the sign, so it is brought down.
template <int BITS>
inline Floats codes_at(const uint32_t* words_L, int place) {
  constexpr uint32_t MASK = (1u << BITS) - 1;
  const Words words = load<Words>(words_L);
  const Words kept = place == 32 - BITS ? words >> place : words & (MASK << place);
  return __builtin_convertvector((Signed)kept, Floats);
}

template <int BITS>
inline float power(int place) {
  return place == 32 - BITS ? 1.f : 1.f / static_cast<float>(1u << place);
}

// total += scale * codes * x over one run, the RUN_OF_WORDS-th that its words have.
template <int BITS, int M, int RUN_OF_WORDS>
inline void add_run(const float* x_MI, int64_t padded, const uint32_t* words_L, float scale,
                    Floats* total_M) {
  Floats partial[M] = {};
#pragma GCC unroll 4
  for (int step = 0; step < STEPS; step++) {
    const Floats codes = codes_at<BITS>(words_L, BITS * (RUN_OF_WORDS * STEPS + step));
#pragma GCC unroll 4
    for (int m = 0; m < M; m++) partial[m] += codes * load<Floats>(x_MI + m * padded + step * LANES);
  }
#pragma GCC unroll 4
  for (int m = 0; m < M; m++) total_M[m] += scale * partial[m];
}

// M rows times one row of the weight. x_MI: padded, over the powers of two that codes_at leaves.
// sums_MGL: what each group's least value is multiplied with.
template <int BITS, int M>
inline void dot(const Rows<BITS>& rows, int64_t o, const float* x_MI, const float* sums_MGL,
                float* out_M) {
  Floats total[M] = {};
  const uint32_t* row = rows.row(o);
  const uint32_t* groups_G = rows.groups_of(o);
  const int64_t runs = rows.runs();
  for (int64_t run = 0; run < runs; run += Rows<BITS>::RUNS_OF_WORDS) {
    const uint32_t* words_L = row + run / Rows<BITS>::RUNS_OF_WORDS * LANES;
    __builtin_prefetch(words_L + PREFETCH_WORDS);
    const float* x = x_MI + run * RUN;
    const float scale = low_half(groups_G[run / rows.runs_of_group]);
    add_run<BITS, M, 0>(x, rows.padded, words_L, scale, total);
    if constexpr (BITS == 4) {
      if (run + 1 == runs) break;
      const float next = low_half(groups_G[(run + 1) / rows.runs_of_group]);
      add_run<BITS, M, 1>(x + RUN, rows.padded, words_L, next, total);
    }
  }
  for (int64_t g = 0; g < rows.groups; g++) {
    const float least = high_half(groups_G[g]);
#pragma GCC unroll 4
    for (int m = 0; m < M; m++) {
      total[m] += least * load<Floats>(sums_MGL + (m * rows.groups + g) * LANES);
    }
  }
  for (int m = 0; m < M; m++) {
    out_M[m] = 0;
    for (int64_t l = 0; l < LANES; l++) out_M[m] += total[m][l];
  }
}

template <int BITS, typename T_>
void multiply(const Rows<BITS>& rows, const T_* x_MI, const T_* bias_O, T_* out_MO, int64_t num_rows) {
  std::vector<float> scaled_MI(num_rows * rows.padded), sums_MGL(num_rows * rows.groups * LANES);
  for (int64_t m = 0; m < num_rows; m++) {
    for (int64_t i = 0; i < rows.inputs; i++) {
      const float x = static_cast<float>(x_MI[m * rows.inputs + i]);
      const int64_t run = i / RUN, g = run / rows.runs_of_group;
      scaled_MI[m * rows.padded + i] = x * power<BITS>(rows.place(run, i % RUN / LANES));
      sums_MGL[(m * rows.groups + g) * LANES + i % LANES] += x;
    }
  }
  const int64_t grain = WORDS_PER_TASK / (rows.words + 1) + 1;
  at::parallel_for(0, rows.outputs, grain, [&](int64_t begin, int64_t end) {
    for (int64_t o = begin; o < end; o++) {
      const float b = bias_O == nullptr ? 0.f : static_cast<float>(bias_O[o]);
      for (int64_t m = 0; m < num_rows;) {
        float out[4];
        const float* x = &scaled_MI[m * rows.padded];
        const float* sums = &sums_MGL[m * rows.groups * LANES];
        const int64_t left = num_rows - m, together = left >= 4 ? 4 : left >= 2 ? 2 : 1;
        if (together == 4) {
          dot<BITS, 4>(rows, o, x, sums, out);
        } else if (together == 2) {
          dot<BITS, 2>(rows, o, x, sums, out);
        } else {
          dot<BITS, 1>(rows, o, x, sums, out);
        }
        for (int64_t k = 0; k < together; k++) {
          out_MO[(m + k) * rows.outputs + o] = static_cast<T_>(out[k] + b);
        }
        m += together;
      }
    }
  });
}

template <int BITS, int RUN_OF_WORDS, typename T_>
inline void put_run(const uint32_t* words_L, uint32_t group, T_* out_I, int64_t count) {
  T_ values[RUN];
#pragma GCC unroll 4
  for (int step = 0; step < STEPS; step++) {
    constexpr int FIRST = BITS * RUN_OF_WORDS * STEPS;
    const int place = FIRST + BITS * step;
    const float scale = low_half(group) * power<BITS>(place);
    const Floats numbers = high_half(group) + scale * codes_at<BITS>(words_L, place);
    for (int64_t l = 0; l < LANES; l++) values[step * LANES + l] = static_cast<T_>(numbers[l]);
  }
  std::memcpy(out_I, values, std::min(count, RUN) * sizeof(T_));
}

template <int BITS, typename T_>
void put_together(const Rows<BITS>& rows, T_* matrix_OI) {
  const int64_t grain = WORDS_PER_TASK / (rows.words + 1) + 1;
  at::parallel_for(0, rows.outputs, grain, [&](int64_t begin, int64_t end) {
    for (int64_t o = begin; o < end; o++) {
      T_* out_I = matrix_OI + o * rows.inputs;
      for (int64_t run = 0; run < rows.runs(); run++) {
        const uint32_t* words_L = rows.row(o) + run / Rows<BITS>::RUNS_OF_WORDS * LANES;
        const uint32_t group = rows.groups_of(o)[run / rows.runs_of_group];
        const int64_t left = rows.inputs - run * RUN;
        if (BITS == 8 || run % 2 == 0) {
          put_run<BITS, 0>(words_L, group, out_I + run * RUN, left);
        } else {
          put_run<4, 1>(words_L, group, out_I + run * RUN, left);
        }
      }
    }
  });
}

// Runs `body` with the dtype's and the bits' types.
template <typename Body>
void by_kind(at::ScalarType dtype, const Tensor& weight, int64_t inputs, int64_t bits, int64_t group,
             Body body) {
  TORCH_CHECK(weight.dim() == 2 && weight.scalar_type() == at::kInt && weight.is_contiguous(),
              "a quantized weight is a matrix of int32 words, contiguous");
  TORCH_CHECK(group >= RUN && group % RUN == 0, "a group of ", group, " is no multiple of ", RUN);
  TORCH_CHECK(bits == 4 || bits == 8, "weights have 4 or 8 bits, not ", bits);
  TORCH_CHECK(dtype == at::kFloat || dtype == at::kBFloat16, "herder's kernels take fp32 and bf16 only");
  auto with_bits = [&](auto number) {
    if (bits == 4) {
      body(number, Rows<4>(weight, inputs, group));
    } else {
      body(number, Rows<8>(weight, inputs, group));
    }
  };
  if (dtype == at::kFloat) {
    with_bits(float{});
  } else {
    with_bits(at::BFloat16{});
  }
}

// x W^T + b.
Tensor quantized_product(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                         int64_t bits, int64_t group) {
  TORCH_CHECK(x.dim() == 2, "quantized_product: x ", x.sizes(), " is no matrix");
  TORCH_CHECK(!bias.has_value() || bias->scalar_type() == x.scalar_type(),
              "quantized_product: dtypes differ");
  const Tensor x_rows = x.contiguous(), offset = bias.has_value() ? bias->contiguous() : Tensor();
  Tensor out = at::empty({x.size(0), weight.size(0)}, x.options());
  by_kind(x.scalar_type(), weight, x.size(1), bits, group, [&](auto number, const auto& rows) {
    using T_ = decltype(number);
    const T_* bias_O = offset.defined() ? offset.const_data_ptr<T_>() : nullptr;
    multiply(rows, x_rows.const_data_ptr<T_>(), bias_O, out.mutable_data_ptr<T_>(), x.size(0));
  });
  return out;
}

// The matrix, [O, I].
Tensor dequantized(const Tensor& weight, int64_t inputs, at::ScalarType dtype, int64_t bits,
                   int64_t group) {
  Tensor out = at::empty({weight.size(0), inputs}, weight.options().dtype(dtype));
  by_kind(dtype, weight, inputs, bits, group, [&](auto number, const auto& rows) {
    put_together(rows, out.mutable_data_ptr<decltype(number)>());
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(herder, library) {
  library.def(
      "quantized_product(Tensor x, Tensor weight, Tensor? bias, int bits, int group) -> Tensor");
  library.def(
      "dequantized(Tensor weight, int inputs, ScalarType dtype, int bits, int group) -> Tensor");
}

TORCH_LIBRARY_IMPL(herder, CPU, library) {
  library.impl("quantized_product", quantized_product);
  library.impl("dequantized", dequantized);
}
