// Decode attention on a CPU: what `decode_attention.py` specifies, read where it lies.
//
//     task                a split of a query row, SPLIT keys at most, and some of the KV heads
//     partial result      of a split: its highest score, the sum of exp(score - highest), and the
//                         values weighted with these, for each query head
//     merge               a row's partial results, scaled to the highest score of all
//
// Tasks come in the order of split numbers: rows that share a prefix read it one after the other, and
// all but the first from the processor's cache. A task reads all its keys, then all its values, each in
// the order of the memory, and fetches what comes AHEAD bytes later: a processor does that by itself
// only while little is computed. Query heads that share a KV head (SHARED) read it together.
//
// Constants: SCALAR, KV_HEADS, SHARED, HEAD_DIM, BLOCK_SIZE, SPLIT_BLOCKS. Strides count numbers. A
// result depends neither on the other rows, nor on which blocks a sequence has, nor on the threads.
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
constexpr int AHEAD = 2048;  // bytes

struct Partial {  // of the query heads that share a KV head
  Number highest[SHARED], total[SHARED], weighted[SHARED][HEAD_DIM];
};

static Number higher(Number a, Number b) { return b > a || b != b ? b : a; }  // NaN is highest

// The memory that comes AHEAD bytes after these numbers.
template <int SIZE>
static inline void fetch(const SCALAR* from) {
  for (int i = 0; i < SIZE; i += 64 / sizeof(SCALAR))
    __builtin_prefetch(from + AHEAD / sizeof(SCALAR) + i);
}

// scores[q * SPLIT + k] of neighbouring keys
template <int NUM_KEYS>
static inline void score(
    const Number (*query)[HEAD_DIM], const SCALAR* keys, int64_t slot_stride, Number* scores) {
  Lanes sums[QUERIES][NUM_KEYS] = {};
  for (int d = 0; d < HEAD_DIM; d += LANES) {
    fetch<NUM_KEYS * LANES>(keys + d * NUM_KEYS);
    Lanes own[QUERIES];
    for (int q = 0; q < QUERIES; ++q) own[q] = load<LANES>(query[q] + d);
    for (int k = 0; k < NUM_KEYS; ++k) {
      const Lanes key = load<LANES>(keys + k * slot_stride + d);
      for (int q = 0; q < QUERIES; ++q) sums[q][k] += key * own[q];
    }
  }
  for (int k = 0; k < NUM_KEYS; ++k)
    for (int q = 0; q < QUERIES; ++q) scores[q * SPLIT + k] = sum<Number, LANES>(sums[q][k]);
}

static void score_slots(
    const Number (*query)[HEAD_DIM], const SCALAR* keys, int64_t slot_stride, int num_slots,
    Number* scores) {
  int slot = 0;
  for (; slot + KEYS <= num_slots; slot += KEYS)
    score<KEYS>(query, keys + slot * slot_stride, slot_stride, scores + slot);
  for (; slot < num_slots; ++slot) score<1>(query, keys + slot * slot_stride, slot_stride, scores + slot);
}

// Scores become exp(score - highest).
static void weigh(Number* scores, int64_t num_keys, Number& highest, Number& total) {
  highest = -std::numeric_limits<Number>::infinity();
  for_lanes<Number>(0, num_keys, [&](auto n, int64_t k) {
    const auto own = load<n>(scores + k);
    for (int i = 0; i < n; ++i) highest = higher(highest, own[i]);
  });
  total = 0;
  for_lanes<Number>(0, num_keys, [&](auto n, int64_t k) {
    const auto weights = exponential<n>(load<n>(scores + k) - highest);
    store<n>(scores + k, weights);
    total += sum<Number, n>(weights);
  });
}

static void add_values(
    const Number* weights, const SCALAR* values, int64_t slot_stride, int num_slots,
    Number (*weighted)[HEAD_DIM]) {
  for (int d = 0; d < HEAD_DIM; d += VECTORS * LANES) {
    Lanes sums[QUERIES][VECTORS];
    for (int q = 0; q < QUERIES; ++q)
      for (int v = 0; v < VECTORS; ++v) sums[q][v] = load<LANES>(weighted[q] + d + v * LANES);
    for (int k = 0; k < num_slots; ++k) {
      fetch<VECTORS * LANES>(values + d * num_slots + k * VECTORS * LANES);
      for (int v = 0; v < VECTORS; ++v) {
        const Lanes value = load<LANES>(values + k * slot_stride + d + v * LANES);
        for (int q = 0; q < QUERIES; ++q) sums[q][v] += value * weights[q * SPLIT + k];
      }
    }
    for (int q = 0; q < QUERIES; ++q)
      for (int v = 0; v < VECTORS; ++v) store<LANES>(weighted[q] + d + v * LANES, sums[q][v]);
  }
}

struct Caches {  // of [num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM], in memory of any order but the last
  const SCALAR *keys, *values;
  int64_t block_stride, slot_stride, head_stride;
};

// Keys [first, last) of the sequence of `table`, whose first block begins with key `start`, and
// `num_heads` KV heads, for whose query heads there are `query` and `partials`.
static void attend_split(
    const SCALAR* query, Number scale, const Caches& caches, const int32_t* table, int64_t start,
    int64_t first, int64_t last, int head, int num_heads, Partial* partials) {
  Number scaled[KV_HEADS][SHARED][HEAD_DIM], scores[KV_HEADS][SHARED][SPLIT];
  for (int h = 0; h < num_heads; ++h)
    for (int q = 0; q < SHARED; ++q)
      for (int d = 0; d < HEAD_DIM; d += LANES) {
        store<LANES>(scaled[h][q] + d, load<LANES>(query + (h * SHARED + q) * HEAD_DIM + d) * scale);
        store<LANES>(partials[h].weighted[q] + d, Lanes{});
      }
  const auto for_slots = [&](const SCALAR* cache, auto f) {  // those of a block and a head
    for (int64_t at = first; at < last; at = (at / BLOCK_SIZE + 1) * BLOCK_SIZE) {
      const int slot = at % BLOCK_SIZE, num_slots = std::min<int64_t>(last - at, BLOCK_SIZE - slot);
      const SCALAR* block = cache + table[(at - start) / BLOCK_SIZE] * caches.block_stride;
      for (int h = 0; h < num_heads; ++h) {
        const SCALAR* own = block + (head + h) * caches.head_stride + slot * caches.slot_stride;
        for (int q = 0; q < SHARED; q += QUERIES) f(own, num_slots, h, q, at - first);
      }
    }
  };
  for_slots(caches.keys, [&](const SCALAR* keys, int num_slots, int h, int q, int64_t k) {
    score_slots(scaled[h] + q, keys, caches.slot_stride, num_slots, scores[h][q] + k);
  });
  for (int h = 0; h < num_heads; ++h)
    for (int q = 0; q < SHARED; ++q)
      weigh(scores[h][q], last - first, partials[h].highest[q], partials[h].total[q]);
  for_slots(caches.values, [&](const SCALAR* values, int num_slots, int h, int q, int64_t k) {
    add_values(scores[h][q] + k, values, caches.slot_stride, num_slots, partials[h].weighted + q);
  });
}

static void merge(const Partial* partials, int64_t num_splits, int q, SCALAR* output) {
  Number highest = -std::numeric_limits<Number>::infinity(), total = 0, sums[HEAD_DIM] = {};
  for (int64_t s = 0; s < num_splits; ++s)
    highest = higher(highest, partials[s * KV_HEADS].highest[q]);
  for (int64_t s = 0; s < num_splits; ++s) {
    const Partial& partial = partials[s * KV_HEADS];
    const Number share = exponential<1>(Vector<Number, 1>{partial.highest[q] - highest})[0];
    total += share * partial.total[q];
    for (int d = 0; d < HEAD_DIM; ++d) sums[d] += share * partial.weighted[q][d];
  }
  for (int d = 0; d < HEAD_DIM; d += LANES)
    store<LANES>(output + d, load<LANES>(sums + d) / total);
}

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
        const int64_t last = std::min(num_keys[row], start + SPLIT);
        const int64_t first = std::clamp(num_keys[row] - window, start, last);
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
