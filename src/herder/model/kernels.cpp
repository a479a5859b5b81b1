// What decoding on a CPU spends its time in: products of a few rows, norms, rotations, and the
// attention of new tokens over cached ones. Each computes what the Python beside it computes.
//
// Legend: T tokens, M rows, I input dim, O output dim, D last dim, N query heads, K key-value
// heads, H head dim, V value dim, B blocks, S tokens of a block, R rotated pairs. T_ is the dtype of
// activations.
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

// Attention over blocks of keys and values. Queries are cut into tiles, up to QUERIES_A_TILE rows
// (tokens x heads) of one sequence and one key-value head, that meet KEYS_A_TILE keys at a time.
constexpr int64_t KEYS_A_TILE = 16;
constexpr int64_t QUERIES_A_TILE = 32;
constexpr int64_t FEW_QUERIES = 4;  // up to here, turning keys for the product takes longer than it

// sums[m, 0..16) += x[m] y[:, 0..16) for M rows.
template <int M>
inline void rows_times_tile(const float* x, int64_t x_step, const float* y, int64_t y_step,
                            int64_t dim, float* sums, int64_t sums_step) {
  float partial[M][KEYS_A_TILE];
  for (int m = 0; m < M; m++) std::copy_n(sums + m * sums_step, KEYS_A_TILE, partial[m]);
  for (int64_t d = 0; d < dim; d++) {
    for (int m = 0; m < M; m++) {
      for (int64_t k = 0; k < KEYS_A_TILE; k++) {
        partial[m][k] += x[m * x_step + d] * y[d * y_step + k];
      }
    }
  }
  for (int m = 0; m < M; m++) std::copy_n(partial[m], KEYS_A_TILE, sums + m * sums_step);
}

inline void times_tile(int64_t rows, const float* x, int64_t x_step, const float* y, int64_t y_step,
                       int64_t dim, float* sums, int64_t sums_step) {
  for (; rows > 0; rows -= 4, x += 4 * x_step, sums += 4 * sums_step) {
    switch (std::min<int64_t>(rows, 4)) {
      case 1: rows_times_tile<1>(x, x_step, y, y_step, dim, sums, sums_step); break;
      case 2: rows_times_tile<2>(x, x_step, y, y_step, dim, sums, sums_step); break;
      case 3: rows_times_tile<3>(x, x_step, y, y_step, dim, sums, sums_step); break;
      default: rows_times_tile<4>(x, x_step, y, y_step, dim, sums, sums_step);
    }
  }
}

struct QueryTile {
  int64_t row, tokens, position, table, head, heads;
};

struct PagedAttention {
  int64_t query_heads, kv_heads, dim, value_dim, block_size, window;
  bool sliding, chunked;
  float scale, softcap;  // 0: no cap
  const int64_t* tables;
  const float* sinks;  // null: none

  int64_t first_visible(int64_t position) const {
    if (sliding) return std::max<int64_t>(0, position - window + 1);
    return chunked ? position / window * window : 0;
  }

  template <typename T_>
  void attend(const QueryTile& tile, const T_* q_TNH, const Tensor& keys, const Tensor& values,
              T_* out_TNV) const {
    const T_* keys_BSKH = keys.const_data_ptr<T_>();
    const T_* values_BSKV = values.const_data_ptr<T_>();
    const int64_t rows = tile.tokens * tile.heads, kv_head = tile.head / (query_heads / kv_heads);
    const int64_t width = (value_dim + KEYS_A_TILE - 1) / KEYS_A_TILE * KEYS_A_TILE;
    std::vector<float> q(rows * dim), turned(dim * KEYS_A_TILE), value(KEYS_A_TILE * width);
    std::vector<float> scores(rows * KEYS_A_TILE), out(rows * width);
    std::vector<float> largest(rows, -INFINITY), sum(rows, 0.f);
    for (int64_t r = 0; r < rows; r++) {
      const int64_t token = tile.row + r / tile.heads, head = tile.head + r % tile.heads;
      std::copy_n(q_TNH + (token * query_heads + head) * dim, dim, &q[r * dim]);
      if (sinks != nullptr) largest[r] = sinks[head], sum[r] = 1.f;
    }
    const int64_t end = tile.position + tile.tokens;
    for (int64_t p = first_visible(tile.position); p < end; p += KEYS_A_TILE) {
      const int64_t together = std::min(KEYS_A_TILE, end - p);
      std::fill(scores.begin(), scores.end(), 0.f);
      for (int64_t k = 0; k < together; k++) {
        const int64_t block = tables[tile.table + (p + k) / block_size], place = (p + k) % block_size;
        const T_* key_H = keys_BSKH + block * keys.stride(0) + place * keys.stride(1) +
                          kv_head * keys.stride(2);
        const T_* value_V = values_BSKV + block * values.stride(0) + place * values.stride(1) +
                            kv_head * values.stride(2);
        std::copy_n(value_V, value_dim, &value[k * width]);
        if (rows > FEW_QUERIES) {
          for (int64_t h = 0; h < dim; h++) turned[h * KEYS_A_TILE + k] = key_H[h];
        } else {
          for (int64_t r = 0; r < rows; r++) dot<1>(&q[r * dim], key_H, &scores[r * KEYS_A_TILE + k], dim);
        }
      }
      if (rows > FEW_QUERIES) {
        times_tile(rows, q.data(), dim, turned.data(), KEYS_A_TILE, dim, scores.data(), KEYS_A_TILE);
      }
      for (int64_t r = 0; r < rows; r++) {
        float* score = &scores[r * KEYS_A_TILE];
        const int64_t position = tile.position + r / tile.heads, first = first_visible(position);
        float peak = largest[r];
        for (int64_t k = 0; k < KEYS_A_TILE; k++) {
          score[k] *= scale;
          if (softcap != 0) score[k] = softcap * std::tanh(score[k] / softcap);
          if (k >= together || p + k < first || p + k > position) score[k] = -INFINITY;
          peak = std::max(peak, score[k]);
        }
        if (peak == -INFINITY) peak = 0;  // it sees none of these, nor any before
        const float kept = std::exp(largest[r] - peak);
        at::vec::map<float>([&](auto x) { return (x - decltype(x)(peak)).exp(); }, score, score,
                            KEYS_A_TILE);
        sum[r] *= kept;
        for (int64_t k = 0; k < KEYS_A_TILE; k++) sum[r] += score[k];
        for (int64_t v = 0; v < width; v++) out[r * width + v] *= kept;
        largest[r] = peak;
      }
      for (int64_t v = 0; v < width; v += KEYS_A_TILE) {
        times_tile(rows, scores.data(), KEYS_A_TILE, &value[v], width, together, &out[v], width);
      }
    }
    for (int64_t r = 0; r < rows; r++) {
      const int64_t token = tile.row + r / tile.heads, head = tile.head + r % tile.heads;
      T_* out_V = out_TNV + (token * query_heads + head) * value_dim;
      for (int64_t v = 0; v < value_dim; v++) out_V[v] = T_(out[r * width + v] / sum[r]);
    }
  }
};

// spans [Q, 4]: of each sequence its first row, rows, first position, and its place in `tables`.
Tensor attend_paged(const Tensor& q, const Tensor& keys, const Tensor& values, const Tensor& tables,
                    const Tensor& spans, c10::string_view kind, int64_t window, double scale,
                    std::optional<double> softcap, const std::optional<Tensor>& sinks) {
  const int64_t heads = q.size(1), kv_heads = keys.size(2), group = heads / kv_heads;
  TORCH_CHECK(keys.size(3) == q.size(2) && values.size(2) == kv_heads && heads % kv_heads == 0,
              "attend_paged: q ", q.sizes(), " and keys ", keys.sizes(), " do not fit");
  TORCH_CHECK(keys.stride(3) == 1 && values.stride(3) == 1,
              "attend_paged: a head's numbers must lie together");
  TORCH_CHECK(keys.scalar_type() == q.scalar_type(), "attend_paged: dtypes differ");
  const Tensor q_rows = q.contiguous(), table = tables.contiguous(), span = spans.contiguous();
  const Tensor sink = sinks.has_value() ? sinks->to(at::kFloat).contiguous() : Tensor();
  const PagedAttention attention{
      heads, kv_heads, q.size(2), values.size(3), keys.size(1), window, kind == "sliding",
      kind == "chunked", float(scale), float(softcap.value_or(0)), table.const_data_ptr<int64_t>(),
      sink.defined() ? sink.const_data_ptr<float>() : nullptr};
  const int64_t most_heads = std::min(group, QUERIES_A_TILE), most_tokens = QUERIES_A_TILE / most_heads;
  std::vector<QueryTile> tiles;
  for (int64_t s = 0; s < span.size(0); s++) {
    const int64_t* of = span.const_data_ptr<int64_t>() + 4 * s;
    for (int64_t t = 0; t < of[1]; t += most_tokens) {
      for (int64_t head = 0; head < heads; head += std::min(most_heads, group - head % group)) {
        tiles.push_back({of[0] + t, std::min(most_tokens, of[1] - t), of[2] + t, of[3], head,
                         std::min(most_heads, group - head % group)});
      }
    }
  }
  Tensor out = at::empty({q.size(0), heads, values.size(3)}, q.options());
  by_dtype(q, [&](auto element) {
    using T_ = decltype(element);
    const T_* q_TNH = q_rows.const_data_ptr<T_>();
    T_* out_TNV = out.mutable_data_ptr<T_>();
    at::parallel_for(0, int64_t(tiles.size()), 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) attention.attend(tiles[i], q_TNH, keys, values, out_TNV);
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
  library.def(
      "attend_paged(Tensor q, Tensor keys, Tensor values, Tensor tables, Tensor spans, str kind, "
      "int window, float scale, float? softcap, Tensor? sinks) -> Tensor");
}

TORCH_LIBRARY_IMPL(herder, CPU, library) {
  library.impl("few_rows_product", few_rows_product);
  library.impl("rms_norm", rms_norm);
  library.impl("rotate", rotate);
  library.impl("silu_times", silu_times);
  library.impl("attend_paged", attend_paged);
}
