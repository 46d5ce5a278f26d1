// x @ weight.T in float, for weights in panels: COLUMNS rows of the weight side by side, so that one
// step of the sum reads a run of memory.
//
//     weight [out_features, depth]        panels [out_features / COLUMNS, depth, COLUMNS]
//
// A panel is multiplied DEPTH steps at a time, which stay in the first cache, with BLOCK rows of x. A
// tile of at most ROWS x COLUMNS sums stays in registers, while the next weights are fetched. Weights
// may be bfloat16: for more rows than one tile they are widened once. A row's result does not depend on
// the others: every sum goes from the first step to the last, whatever the tile. (Goto and van de Geijn
// 2008.)
#include "vectors.h"

constexpr int LANES = REGISTER_BYTES / sizeof(float), COLUMNS = 2 * LANES;
constexpr int ROWS = LANES == 16 ? 12 : 6;  // so many rows of sums fill the registers
constexpr int DEPTH = 4096 / COLUMNS, LINE = 64;  // bytes of a line of the cache
constexpr int64_t BLOCK = 192;
using Lanes = Vector<float, LANES>;

extern "C" int64_t num_columns() { return COLUMNS; }

// Whether bfloat16 can hold all of these.
extern "C" int are_bfloat16(const uint32_t* words, int64_t size, int num_threads) {
  uint32_t lost = 0;
#pragma omp parallel for simd reduction(| : lost) num_threads(num_threads)
  for (int64_t i = 0; i < size; ++i) lost |= words[i] & 0xffff;
  return lost == 0;
}

template <class T>
static void pack(
    const float* weight, T* panels, int64_t out_features, int64_t depth, int num_threads) {
  const int64_t num_panels = (out_features + COLUMNS - 1) / COLUMNS;
#pragma omp parallel for num_threads(num_threads)
  for (int64_t p = 0; p < num_panels; ++p) {
    const int64_t columns = std::min<int64_t>(COLUMNS, out_features - p * COLUMNS);
    for (int64_t k = 0; k < depth; ++k) {
      float step[COLUMNS] = {};  // zeros beyond the last row
      for (int64_t c = 0; c < columns; ++c) step[c] = weight[(p * COLUMNS + c) * depth + k];
      for (int v = 0; v < 2; ++v)
        store<LANES>(panels + (p * depth + k) * COLUMNS + v * LANES, load<LANES>(step + v * LANES));
    }
  }
}

// Add `depth` steps to a tile of `output`. Strides count numbers. `next` is what the panels hold after
// these steps.
template <int NUM_ROWS, class T, class Next>
static inline void add_tile(
    const float* x, int64_t x_stride, const T* panel, int depth, const Next* next, float* output,
    int64_t stride) {
  Lanes sums[NUM_ROWS][2];
  for (int r = 0; r < NUM_ROWS; ++r)
    for (int v = 0; v < 2; ++v) sums[r][v] = load<LANES>(output + r * stride + v * LANES);
  for (int k = 0; k < depth; ++k) {
    for (int i = 0; i < COLUMNS; i += LINE / sizeof(Next))
      __builtin_prefetch(next + k * COLUMNS + i, 0, 2);  // into the second cache
    const Lanes first = load<LANES>(panel + k * COLUMNS);
    const Lanes second = load<LANES>(panel + k * COLUMNS + LANES);
    for (int r = 0; r < NUM_ROWS; ++r) {
      const float factor = x[r * x_stride + k];
      sums[r][0] += first * factor;
      sums[r][1] += second * factor;
    }
  }
  for (int r = 0; r < NUM_ROWS; ++r)
    for (int v = 0; v < 2; ++v) store<LANES>(output + r * stride + v * LANES, sums[r][v]);
}

// The same for any number of rows below NUM_ROWS + 1.
template <int NUM_ROWS, class T, class Next>
static void add_rows(
    const float* x, int64_t x_stride, const T* panel, int depth, const Next* next, float* output,
    int64_t stride, int64_t num_rows) {
  if constexpr (NUM_ROWS > 0) {
    if (num_rows == NUM_ROWS)
      add_tile<NUM_ROWS>(x, x_stride, panel, depth, next, output, stride);
    else
      add_rows<NUM_ROWS - 1>(x, x_stride, panel, depth, next, output, stride, num_rows);
  }
}

template <class T>
static void multiply(
    const float* x, const T* panels, const float* bias, const float* residual, float* output,
    int64_t num_rows, int64_t out_features, int64_t depth, int num_threads) {
  const int64_t num_panels = (out_features + COLUMNS - 1) / COLUMNS;
  for (int64_t row = 0; row < num_rows; row += BLOCK) {
    const int64_t rows = std::min(BLOCK, num_rows - row), num_tiles = (rows + ROWS - 1) / ROWS;
#pragma omp parallel for schedule(dynamic) num_threads(num_threads)
    for (int64_t p = 0; p < num_panels; ++p) {
      alignas(64) float wide[DEPTH * COLUMNS], edge[BLOCK * COLUMNS];
      const int64_t column = p * COLUMNS, columns = std::min<int64_t>(COLUMNS, out_features - column);
      const bool is_whole = columns == COLUMNS;
      float* target = is_whole ? output + row * out_features + column : edge;
      const int64_t stride = is_whole ? out_features : COLUMNS;
      float start[COLUMNS] = {};
      if (bias) std::copy_n(bias + column, columns, start);
      for (int64_t r = 0; r < rows; ++r) {
        const float* onto = residual + (row + r) * out_features + column;  // may be the output
        for (int64_t c = 0; c < columns; ++c)
          target[r * stride + c] = residual ? start[c] + onto[c] : start[c];
      }
      for (int64_t k = 0; k < depth; k += DEPTH) {
        const int steps = std::min<int64_t>(DEPTH, depth - k);
        const float* own = x + row * depth + k;
        const T *panel = panels + (p * depth + k) * COLUMNS, *next = panel + steps * COLUMNS;
        const auto add_all = [&](const auto* panel) {
          for (int64_t t = 0, r = 0, end; t < num_tiles; ++t, r = end) {
            end = rows * (t + 1) / num_tiles;  // tiles of equal size: a small one has too few sums
            add_rows<ROWS>(
                own + r * depth, depth, panel, steps, next, target + r * stride, stride, end - r);
          }
        };
        if constexpr (std::is_same_v<T, float>) {
          add_all(panel);
        } else if (rows <= ROWS) {
          add_all(panel);
        } else {
          for (int i = 0; i < steps * COLUMNS; i += LANES) store<LANES>(wide + i, load<LANES>(panel + i));
          add_all(wide);
        }
      }
      if (!is_whole)
        for (int64_t r = 0; r < rows; ++r)
          std::copy_n(edge + r * COLUMNS, columns, output + (row + r) * out_features + column);
    }
  }
}

#define FOR_WEIGHTS(NAME, T)                                                                       \
  extern "C" void pack_##NAME(const float* w, T* panels, int64_t n, int64_t depth, int threads) {  \
    pack(w, panels, n, depth, threads);                                                            \
  }                                                                                                \
  extern "C" void multiply_##NAME(                                                                 \
      const float* x, const T* panels, const float* bias, const float* residual, float* output,    \
      int64_t num_rows, int64_t out_features, int64_t depth, int num_threads) {                    \
    multiply(x, panels, bias, residual, output, num_rows, out_features, depth, num_threads);       \
  }
FOR_WEIGHTS(float, float)
FOR_WEIGHTS(bfloat16, bfloat16)
