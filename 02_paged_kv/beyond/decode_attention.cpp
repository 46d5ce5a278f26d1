// Decode attention on a CPU: what `decode_attention.py` specifies, read where it lies.
//
//     task                a split of a query row, SPLIT keys at most, and some of the KV heads
//     partial result      of a split: its highest score, the sum of exp(score - highest), and the
//                         values weighted with these, for each query head
//     merge               a row's partial results, scaled to the highest score of all
//
// Tasks come in the order of split numbers: rows that share a prefix read it one after the other, and
// all but the first from the processor's cache. While a head's keys of a block are computed with, the
// next ones are fetched. Query heads that share a KV head (SHARED) read it together.
//
// Constants: SCALAR, KV_HEADS, SHARED, HEAD_DIM, BLOCK_SIZE, SPLIT_BLOCKS. Strides count numbers. A result depends
// neither on the other rows, nor on which blocks a sequence has, nor on the number of threads.
#include "vectors.h"

using Number = Wide<SCALAR>;
constexpr int SPLIT = SPLIT_BLOCKS * BLOCK_SIZE;
constexpr int LANES = lanes<Number>(HEAD_DIM);
using Lanes = Vector<Number, LANES>;

constexpr int divisor(int n, int most) {
  while (n % most) --most;
  return most;
}
// Registers are few: QUERIES heads by KEYS keys of scores, or by VECTORS vectors of values.
constexpr int QUERIES = divisor(SHARED, std::min(SHARED, 8));
constexpr int KEYS = std::max(1, 8 / QUERIES);
constexpr int VECTORS = divisor(HEAD_DIM / LANES, std::min(HEAD_DIM / LANES, KEYS));

struct Partial {  // of the query heads that share a KV head
  Number highest[SHARED], total[SHARED], weighted[SHARED][HEAD_DIM];
};

static Number exponential(Number x) { return exponential<1>(Vector<Number, 1>{x})[0]; }

static Number higher(Number a, Number b) { return b > a || b != b ? b : a; }  // NaN is highest

// scores[q][k] of neighbouring keys
template <int NUM_KEYS>
static inline void score(
    const Number (*query)[HEAD_DIM], const SCALAR* keys, int64_t slot_stride,
    Number (*scores)[BLOCK_SIZE], int first) {
  Lanes sums[NUM_KEYS][QUERIES] = {};
  for (int d = 0; d < HEAD_DIM; d += LANES) {
    Lanes own[QUERIES];
    for (int q = 0; q < QUERIES; ++q) own[q] = load<LANES>(query[q] + d);
    for (int k = 0; k < NUM_KEYS; ++k) {
      const Lanes key = load<LANES>(keys + (first + k) * slot_stride + d);
      for (int q = 0; q < QUERIES; ++q) sums[k][q] += key * own[q];
    }
  }
  for (int k = 0; k < NUM_KEYS; ++k)
    for (int q = 0; q < QUERIES; ++q) scores[q][first + k] = sum<Number, LANES>(sums[k][q]);
}

// Add slots [begin, end) of a block to the partial results of QUERIES heads, `at` the first of them.
static void attend_block(
    const Number (*query)[HEAD_DIM], const SCALAR* keys, const SCALAR* values, int64_t slot_stride,
    int begin, int end, Partial& partial, int at) {
  Number scores[QUERIES][BLOCK_SIZE], fading[QUERIES];
  int slot = begin;
  for (; slot + KEYS <= end; slot += KEYS) score<KEYS>(query, keys, slot_stride, scores, slot);
  for (; slot < end; ++slot) score<1>(query, keys, slot_stride, scores, slot);
  for (int q = 0; q < QUERIES; ++q) {
    Number highest = partial.highest[at + q], total = 0;
    for (int k = begin; k < end; ++k) highest = higher(highest, scores[q][k]);
    fading[q] = exponential(partial.highest[at + q] - highest);
    for_lanes<Number>(begin, end, [&](auto n, int64_t k) {
      const auto weights = exponential<n>(load<n>(scores[q] + k) - highest);
      store<n>(scores[q] + k, weights);
      total += sum<Number, n>(weights);
    });
    partial.highest[at + q] = highest;
    partial.total[at + q] = partial.total[at + q] * fading[q] + total;
  }
  for (int d = 0; d < HEAD_DIM; d += VECTORS * LANES) {
    Lanes sums[QUERIES][VECTORS];
    for (int q = 0; q < QUERIES; ++q)
      for (int v = 0; v < VECTORS; ++v)
        sums[q][v] = load<LANES>(partial.weighted[at + q] + d + v * LANES) * fading[q];
    for (int k = begin; k < end; ++k)
      for (int v = 0; v < VECTORS; ++v) {
        const Lanes value = load<LANES>(values + k * slot_stride + d + v * LANES);
        for (int q = 0; q < QUERIES; ++q) sums[q][v] += value * scores[q][k];
      }
    for (int q = 0; q < QUERIES; ++q)
      for (int v = 0; v < VECTORS; ++v)
        store<LANES>(partial.weighted[at + q] + d + v * LANES, sums[q][v]);
  }
}

static void prefetch(const SCALAR* keys, int64_t slot_stride) {
  for (int slot = 0; slot < BLOCK_SIZE; ++slot)
    for (int d = 0; d < HEAD_DIM; d += 64 / sizeof(SCALAR))
      __builtin_prefetch(keys + slot * slot_stride + d, 0, 2);
}

struct Caches {  // of [num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM], in memory of any order but the last
  const SCALAR *keys, *values;
  int64_t block_stride, slot_stride, head_stride;
};

// Keys [first, last) of the sequence of `table`, of those of a split that begins with key `start`, and
// `num_heads` KV heads, for whose query heads there are `query` and `partials`.
static void attend_split(
    const SCALAR* query, Number scale, const Caches& caches, const int32_t* table, int64_t start,
    int64_t first, int64_t last, int head, int num_heads, Partial* partials) {
  Number scaled[KV_HEADS][SHARED][HEAD_DIM];
  for (int h = 0; h < num_heads; ++h) {
    Partial& partial = partials[h];
    for (int q = 0; q < SHARED; ++q) {
      for (int d = 0; d < HEAD_DIM; d += LANES) {
        store<LANES>(scaled[h][q] + d, load<LANES>(query + (h * SHARED + q) * HEAD_DIM + d) * scale);
        store<LANES>(partial.weighted[q] + d, Lanes{});
      }
      partial.highest[q] = -std::numeric_limits<Number>::infinity();
      partial.total[q] = 0;
    }
  }
  for (int64_t at = start; at < last; at += BLOCK_SIZE, ++table) {
    const int begin = std::clamp<int64_t>(first - at, 0, BLOCK_SIZE);
    const int end = std::min<int64_t>(last - at, BLOCK_SIZE);
    if (begin >= end) continue;  // all of it is in front of a window
    for (int h = 0; h < num_heads; ++h) {
      const bool same_block = h + 1 < num_heads, more = same_block || at + BLOCK_SIZE < last;
      const int64_t place = *table * caches.block_stride + (head + h) * caches.head_stride;
      const int64_t next = same_block ? place + caches.head_stride
                           : more     ? table[1] * caches.block_stride + head * caches.head_stride
                                      : place;
      prefetch(caches.keys + next, caches.slot_stride);
      prefetch(caches.values + next, caches.slot_stride);
      for (int q = 0; q < SHARED; q += QUERIES)
        attend_block(
            scaled[h] + q, caches.keys + place, caches.values + place, caches.slot_stride, begin, end,
            partials[h], q);
    }
  }
}

static void merge(const Partial* partials, int64_t num_splits, int q, SCALAR* output) {
  Number highest = -std::numeric_limits<Number>::infinity(), total = 0, sums[HEAD_DIM] = {};
  for (int64_t s = 0; s < num_splits; ++s)
    highest = higher(highest, partials[s * KV_HEADS].highest[q]);
  for (int64_t s = 0; s < num_splits; ++s) {
    const Partial& partial = partials[s * KV_HEADS];
    const Number share = exponential(partial.highest[q] - highest);
    total += share * partial.total[q];
    for (int d = 0; d < HEAD_DIM; ++d) sums[d] += share * partial.weighted[q][d];
  }
  for (int d = 0; d < HEAD_DIM; d += LANES)
    store<LANES>(output + d, load<LANES>(sums + d) / total);
}

extern "C" int64_t partial_bytes() { return sizeof(Partial); }

extern "C" void attend_rows(
    // [num_tokens, KV_HEADS * SHARED, HEAD_DIM], the output contiguous
    const SCALAR* query, int64_t query_stride, SCALAR* output,
    const SCALAR* keys, const SCALAR* values, int64_t block_stride, int64_t slot_stride,
    int64_t head_stride, const int32_t* tables, int64_t table_stride,
    // [num_rows]: row of the query, row of the tables, keys that it sees, and its first split
    const int64_t* tokens, const int64_t* sequences, const int64_t* num_keys,
    const int64_t* first_split,  // [num_rows + 1]
    // [num_splits]: whose, which one of its own
    const int64_t* owners, const int64_t* numbers, int64_t num_rows, int64_t num_splits,
    int64_t window, double scale, Partial* partials, int num_threads) {
  const Caches caches = {keys, values, block_stride, slot_stride, head_stride};
  const int num_heads = num_splits >= 4 * num_threads ? KV_HEADS : 1;  // of a task
#pragma omp parallel num_threads(num_threads)
  {
#pragma omp for collapse(2) schedule(dynamic)
    for (int64_t task = 0; task < num_splits; ++task)
      for (int head = 0; head < KV_HEADS; head += num_heads) {
        const int64_t row = owners[task], start = numbers[task] * SPLIT;
        const int64_t first = std::max<int64_t>(num_keys[row] - window, 0);
        const int64_t last = std::min(num_keys[row], start + SPLIT);
        attend_split(
            query + tokens[row] * query_stride + head * SHARED * HEAD_DIM, scale, caches,
            tables + sequences[row] * table_stride + start / BLOCK_SIZE, start, first, last, head,
            num_heads, partials + (first_split[row] + numbers[task]) * KV_HEADS + head);
      }
#pragma omp for collapse(2)
    for (int64_t row = 0; row < num_rows; ++row)
      for (int head = 0; head < KV_HEADS * SHARED; ++head)
        merge(
            partials + first_split[row] * KV_HEADS + head / SHARED,
            first_split[row + 1] - first_split[row], head % SHARED,
            output + (tokens[row] * KV_HEADS * SHARED + head) * HEAD_DIM);
  }
}
