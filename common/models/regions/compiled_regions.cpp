// What lies between the matrices of a model, on a CPU: every function reads its input once and writes
// its result once. What they compute is in `regions.py`.
//
// Constants: SCALAR, of the model, and NORM, of the weights of its norms; HEAD_DIM. As in `transformers`,
// what is normed is normed in float, in a model of double, too; the product with the weight is not
// rounded in between. Rows are computed one by one: a result does not depend on the others.
#include "vectors.h"

using Number = Wide<SCALAR>;
constexpr int64_t FEW = 1 << 14;  // numbers from which on a second thread is worth waking
constexpr int HALF = HEAD_DIM / 2, LANES = lanes<Number>(HALF);

template <int N, class T>
static Vector<float, N> single(const T* from) {
  return __builtin_convertvector(load<N>(from), Vector<float, N>);
}

// 1 / sqrt(mean of squares + eps)
static float inverse_rms(const SCALAR* x, int64_t size, float eps) {
  constexpr int FULL = REGISTER_BYTES / sizeof(float);
  Vector<float, FULL> squares = {};
  float rest = 0;
  for_lanes<float>(0, size, [&](auto n, int64_t i) {
    const auto part = single<n>(x + i);
    if constexpr (n == FULL)
      squares += part * part;
    else
      rest += part[0] * part[0];
  });
  return 1 / std::sqrt((sum<float, FULL>(squares) + rest) / size + eps);
}

template <int N>
static Vector<Number, N> normed(const SCALAR* x, float inverse, const NORM* weight) {
  const Vector<Number, N> part = __builtin_convertvector(single<N>(x) * inverse, Vector<Number, N>);
  return part * __builtin_convertvector(load<N>(weight), Vector<Number, N>);
}

extern "C" void rms_norm(
    const SCALAR* x, const NORM* weight, double eps, SCALAR* output, int64_t num_rows, int64_t size,
    int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_rows * size > FEW)
  for (int64_t row = 0; row < num_rows; ++row) {
    const float inverse = inverse_rms(x + row * size, size, eps);
    for_lanes<float>(0, size, [&](auto n, int64_t i) {
      store<n>(output + row * size + i, normed<n>(x + row * size + i, inverse, weight + i));
    });
  }
}

extern "C" void silu_and_multiply(
    const SCALAR* gate_up, SCALAR* output, int64_t num_rows, int64_t size, int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_rows * size > FEW)
  for (int64_t row = 0; row < num_rows; ++row) {
    const SCALAR* gate = gate_up + row * 2 * size;
    for_lanes<Number>(0, size, [&](auto n, int64_t i) {
      const auto x = load<n>(gate + i);
      store<n>(output + row * size + i, x / (1 + exponential<n>(-x)) * load<n>(gate + size + i));
    });
  }
}

// Of each token: query heads, key heads, value heads. Queries go to `output`, keys and values into the
// caches, in memory of any order but the last.
extern "C" void rotate_and_write(
    const SCALAR* qkv, const NORM* weight,  // [num_heads + num_kv_heads, HEAD_DIM], or none
    double eps, const SCALAR* table, const int64_t* positions, const int64_t* slots, SCALAR* keys,
    SCALAR* values, int64_t block_stride, int64_t slot_stride, int64_t head_stride, int64_t block_size,
    SCALAR* output, int64_t num_tokens, int64_t num_heads, int64_t num_kv_heads, int num_threads) {
  const int64_t num_rows = num_heads + 2 * num_kv_heads;
#pragma omp parallel for num_threads(num_threads) if (num_tokens * num_rows * HEAD_DIM > FEW)
  for (int64_t token = 0; token < num_tokens; ++token) {
    const SCALAR* cos = table + positions[token] * HEAD_DIM;
    const int64_t slot = slots[token];
    const int64_t place = slot / block_size * block_stride + slot % block_size * slot_stride;
    for (int64_t head = 0; head < num_rows; ++head) {
      const SCALAR* x = qkv + (token * num_rows + head) * HEAD_DIM;
      const int64_t kv_head = (head - num_heads) % num_kv_heads;
      if (head >= num_heads && slot < 0) continue;  // padding
      if (head >= num_heads + num_kv_heads) {
        std::copy_n(x, HEAD_DIM, values + place + kv_head * head_stride);
        continue;
      }
      SCALAR* to = head < num_heads ? output + (token * num_heads + head) * HEAD_DIM
                                    : keys + place + kv_head * head_stride;
      const float inverse = weight ? inverse_rms(x, HEAD_DIM, eps) : 1;
      const NORM* own = weight + head * HEAD_DIM;
      for (int d = 0; d < HALF; d += LANES) {
        auto a = load<LANES>(x + d), b = load<LANES>(x + HALF + d);
        if (weight) {
          a = normed<LANES>(x + d, inverse, own + d);
          b = normed<LANES>(x + HALF + d, inverse, own + HALF + d);
        }
        const auto c = load<LANES>(cos + d), s = load<LANES>(cos + HALF + d);
        store<LANES>(to + d, a * c - b * s);
        store<LANES>(to + HALF + d, b * c + a * s);
      }
    }
  }
}
