// What decoding on a CPU spends its time in: products of a few rows, norms, rotations, and the
// attention of one token over its cache. Each computes what the Python beside it computes.
//
// Legend: T tokens, M rows, I input dim, O output dim, D last dim, N query heads, K key-value
// heads, H head dim, P cached positions, R rotated pairs. T_ is the dtype of activations.
//
// Sums are fp32 in LANES partial sums, which the compiler keeps in vector registers without being
// allowed to reorder anything else.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <vector>

namespace {

using at::Tensor;

constexpr int64_t LANES = 32;
constexpr int64_t PREFETCH_BYTES = 1024;
constexpr int64_t CACHE_LINE_BYTES = 64;
constexpr int64_t ROWS_TOGETHER = 2;  // more of them and the partial sums spill
constexpr int64_t OUTPUTS_PER_TASK = 16;
constexpr int64_t NUMBERS_PER_TASK = 8192;

// The same for both dtypes: run `body` with a value of the tensor's element type.
template <typename Body>
void by_dtype(const Tensor& x, Body body) {
  if (x.scalar_type() == at::kFloat) {
    body(float{});
  } else {
    TORCH_CHECK(x.scalar_type() == at::kBFloat16, "herder's kernels take fp32 and bf16 only");
    body(at::BFloat16{});
  }
}

template <int M, typename T_>
inline void dot(const float* x_MI, const T_* weight_I, float* sums_M, int64_t dim) {
  float partial[M][LANES] = {};
  int64_t i = 0;
  for (; i + LANES <= dim; i += LANES) {
    for (int64_t byte = 0; byte < LANES * int64_t(sizeof(T_)); byte += CACHE_LINE_BYTES) {
      __builtin_prefetch(reinterpret_cast<const char*>(weight_I + i) + byte + PREFETCH_BYTES);
    }
    for (int m = 0; m < M; m++) {
      for (int64_t lane = 0; lane < LANES; lane++) {
        partial[m][lane] += x_MI[m * dim + i + lane] * static_cast<float>(weight_I[i + lane]);
      }
    }
  }
  for (int m = 0; m < M; m++) {
    float sum = 0;
    for (int64_t lane = 0; lane < LANES; lane++) sum += partial[m][lane];
    for (int64_t rest = i; rest < dim; rest++) {
      sum += x_MI[m * dim + rest] * static_cast<float>(weight_I[rest]);
    }
    sums_M[m] = sum;
  }
}

// x W^T + b.
Tensor few_rows_product(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  TORCH_CHECK(x.dim() == 2 && weight.dim() == 2 && x.size(1) == weight.size(1),
              "few_rows_product: x ", x.sizes(), " and weight ", weight.sizes(), " do not multiply");
  TORCH_CHECK(x.scalar_type() == weight.scalar_type(), "few_rows_product: dtypes differ");
  const Tensor x_rows = x.contiguous(), matrix = weight.contiguous();
  const Tensor offset = bias.has_value() ? bias->contiguous() : Tensor();
  const int64_t rows = x.size(0), dim = x.size(1), outputs = weight.size(0);
  Tensor out = at::empty({rows, outputs}, x.options());
  by_dtype(x, [&](auto kind) {
    using T_ = decltype(kind);
    const T_* narrow_MI = x_rows.const_data_ptr<T_>();
    const T_* weight_OI = matrix.const_data_ptr<T_>();
    const T_* bias_O = offset.defined() ? offset.const_data_ptr<T_>() : nullptr;
    T_* out_MO = out.mutable_data_ptr<T_>();
    const std::vector<float> x_MI(narrow_MI, narrow_MI + rows * dim);
    at::parallel_for(0, outputs, OUTPUTS_PER_TASK, [&](int64_t begin, int64_t end) {
      for (int64_t o = begin; o < end; o++) {
        const float b = bias_O == nullptr ? 0.f : static_cast<float>(bias_O[o]);
        for (int64_t m = 0; m < rows; m += ROWS_TOGETHER) {
          const int64_t together = std::min(ROWS_TOGETHER, rows - m);
          float sums[ROWS_TOGETHER];
          if (together == ROWS_TOGETHER) {
            dot<ROWS_TOGETHER>(&x_MI[m * dim], weight_OI + o * dim, sums, dim);
          } else {
            dot<1>(&x_MI[m * dim], weight_OI + o * dim, sums, dim);
          }
          for (int64_t k = 0; k < together; k++) {
            out_MO[(m + k) * outputs + o] = static_cast<T_>(sums[k] + b);
          }
        }
      }
    });
  });
  return out;
}

// x * rsqrt(mean(x^2) + eps) * weight over the last dim.
Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps, bool multiply_in_fp32) {
  const int64_t dim = x.size(-1);
  TORCH_CHECK(weight.dim() == 1 && weight.size(0) == dim, "rms_norm: weight ", weight.sizes(),
              " for rows of ", dim);
  TORCH_CHECK(x.scalar_type() == weight.scalar_type(), "rms_norm: dtypes differ");
  const Tensor x_rows = x.contiguous(), scale = weight.contiguous();
  Tensor out = at::empty_like(x_rows);
  by_dtype(x, [&](auto kind) {
    using T_ = decltype(kind);
    const T_* x_MD = x_rows.const_data_ptr<T_>();
    const T_* weight_D = scale.const_data_ptr<T_>();
    T_* out_MD = out.mutable_data_ptr<T_>();
    const int64_t rows = dim == 0 ? 0 : x_rows.numel() / dim;
    at::parallel_for(0, rows, NUMBERS_PER_TASK / dim + 1, [&](int64_t begin, int64_t end) {
      for (int64_t m = begin; m < end; m++) {
        const T_* x_D = x_MD + m * dim;
        T_* out_D = out_MD + m * dim;
        float partial[LANES] = {}, sum = 0;
        int64_t d = 0;
        for (; d + LANES <= dim; d += LANES) {
          for (int64_t lane = 0; lane < LANES; lane++) {
            const float value = static_cast<float>(x_D[d + lane]);
            partial[lane] += value * value;
          }
        }
        for (int64_t lane = 0; lane < LANES; lane++) sum += partial[lane];
        for (; d < dim; d++) sum += static_cast<float>(x_D[d]) * static_cast<float>(x_D[d]);
        const float root = 1.f / std::sqrt(sum / dim + static_cast<float>(eps));
        for (int64_t i = 0; i < dim; i++) {
          const float normed = static_cast<float>(x_D[i]) * root;
          const float kept = multiply_in_fp32 ? normed : static_cast<float>(T_(normed));
          out_D[i] = T_(kept * static_cast<float>(weight_D[i]));
        }
      }
    });
  });
  return out;
}

// The first 2R dims of every head turned by its token's angles, products rounded to x's dtype.
Tensor rotate(const Tensor& x, const Tensor& cos, const Tensor& sin, bool interleaved) {
  const int64_t tokens = x.size(0), heads = x.size(1), dim = x.size(2), pairs = cos.size(1);
  TORCH_CHECK(cos.size(0) == tokens && sin.sizes() == cos.sizes() && 2 * pairs <= dim,
              "rotate: x ", x.sizes(), " and cos ", cos.sizes(), " do not fit");
  TORCH_CHECK(x.stride(2) == 1, "rotate: a head's numbers must lie together");
  const Tensor cos_rows = cos.contiguous(), sin_rows = sin.contiguous();
  Tensor out = at::empty({tokens, heads, dim}, x.options());
  const int64_t step = interleaved ? 2 : 1, apart = interleaved ? 1 : pairs;
  by_dtype(x, [&](auto kind) {
    using T_ = decltype(kind);
    const T_* x_TNH = x.const_data_ptr<T_>();
    T_* out_TNH = out.mutable_data_ptr<T_>();
    const float* cos_TR = cos_rows.const_data_ptr<float>();
    const float* sin_TR = sin_rows.const_data_ptr<float>();
    at::parallel_for(0, tokens, NUMBERS_PER_TASK / (heads * dim) + 1, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; t++) {
        for (int64_t n = 0; n < heads; n++) {
          const T_* x_H = x_TNH + t * x.stride(0) + n * x.stride(1);
          T_* out_H = out_TNH + (t * heads + n) * dim;
          for (int64_t r = 0; r < pairs; r++) {
            const float c = T_(cos_TR[t * pairs + r]), s = T_(sin_TR[t * pairs + r]);
            const float a = x_H[r * step], b = x_H[r * step + apart];
            out_H[r * step] = T_(static_cast<float>(T_(a * c)) - static_cast<float>(T_(b * s)));
            out_H[r * step + apart] = T_(static_cast<float>(T_(b * c)) + static_cast<float>(T_(a * s)));
          }
          std::copy(x_H + 2 * pairs, x_H + dim, out_H + 2 * pairs);
        }
      }
    });
  });
  return out;
}

// silu(gate) * up, in one pass over both.
Tensor silu_times(const Tensor& gate, const Tensor& up) {
  TORCH_CHECK(gate.sizes() == up.sizes() && gate.scalar_type() == up.scalar_type(),
              "silu_times: gate ", gate.sizes(), " and up ", up.sizes(), " differ");
  const Tensor gates = gate.contiguous(), ups = up.contiguous();
  Tensor out = at::empty_like(gates);
  by_dtype(gate, [&](auto kind) {
    using T_ = decltype(kind);
    const T_* gate_I = gates.const_data_ptr<T_>();
    const T_* up_I = ups.const_data_ptr<T_>();
    T_* out_I = out.mutable_data_ptr<T_>();
    at::parallel_for(0, gates.numel(), NUMBERS_PER_TASK, [&](int64_t begin, int64_t end) {
      at::vec::map2<T_>(
          [](auto g, auto u) { return g / (decltype(g)(1.f) + g.neg().exp()) * u; },
          out_I + begin, gate_I + begin, up_I + begin, end - begin);
    });
  });
  return out;
}

// One token's queries over all cached positions, softmax in fp32: [N, H].
Tensor attend_one(const Tensor& q, const Tensor& keys, const Tensor& values, double scale) {
  const int64_t heads = q.size(0), dim = q.size(1);
  const int64_t kv_heads = keys.size(0), positions = keys.size(1);
  TORCH_CHECK(keys.sizes() == values.sizes() && keys.size(2) == dim && heads % kv_heads == 0,
              "attend_one: q ", q.sizes(), " and keys ", keys.sizes(), " do not fit");
  TORCH_CHECK(keys.stride(2) == 1 && values.stride(2) == 1,
              "attend_one: a head's numbers must lie together");
  const Tensor q_rows = q.contiguous();
  Tensor out = at::empty_like(q_rows);
  by_dtype(q, [&](auto kind) {
    using T_ = decltype(kind);
    const T_* q_NH = q_rows.const_data_ptr<T_>();
    const T_* keys_KPH = keys.const_data_ptr<T_>();
    const T_* values_KPH = values.const_data_ptr<T_>();
    T_* out_NH = out.mutable_data_ptr<T_>();
    const int64_t grain = NUMBERS_PER_TASK / (positions * dim) + 1;
    at::parallel_for(0, heads, grain, [&](int64_t begin, int64_t end) {
      std::vector<float> q_H(dim), scores_P(positions), out_H(dim);
      for (int64_t n = begin; n < end; n++) {
        const int64_t k = n / (heads / kv_heads);
        const T_* keys_PH = keys_KPH + k * keys.stride(0);
        const T_* values_PH = values_KPH + k * values.stride(0);
        std::copy(q_NH + n * dim, q_NH + (n + 1) * dim, q_H.begin());
        float largest = -INFINITY, sum = 0;
        for (int64_t p = 0; p < positions; p++) {
          dot<1>(q_H.data(), keys_PH + p * keys.stride(1), &scores_P[p], dim);
          scores_P[p] *= static_cast<float>(scale);
          largest = std::max(largest, scores_P[p]);
        }
        for (float& score : scores_P) sum += score = std::exp(score - largest);
        std::fill(out_H.begin(), out_H.end(), 0.f);
        for (int64_t p = 0; p < positions; p++) {
          const float share = static_cast<float>(T_(scores_P[p] / sum));
          const T_* value_H = values_PH + p * values.stride(1);
          for (int64_t h = 0; h < dim; h++) out_H[h] += share * static_cast<float>(value_H[h]);
        }
        std::copy(out_H.begin(), out_H.end(), out_NH + n * dim);
      }
    });
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(herder, library) {
  library.def("few_rows_product(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
  library.def("rms_norm(Tensor x, Tensor weight, float eps, bool multiply_in_fp32) -> Tensor");
  library.def("rotate(Tensor x, Tensor cos, Tensor sin, bool interleaved) -> Tensor");
  library.def("silu_times(Tensor gate, Tensor up) -> Tensor");
  library.def("attend_one(Tensor q, Tensor keys, Tensor values, float scale) -> Tensor");
}

TORCH_LIBRARY_IMPL(herder, CPU, library) {
  library.impl("few_rows_product", few_rows_product);
  library.impl("rms_norm", rms_norm);
  library.impl("rotate", rotate);
  library.impl("silu_times", silu_times);
  library.impl("attend_one", attend_one);
}
