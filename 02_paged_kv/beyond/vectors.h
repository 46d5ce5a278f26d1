// Numbers of a model or of a KV cache (SCALAR: float, double, bfloat16 or _Float16), read into vector
// registers in the type that they are computed with: double in double, all others in float.
//
// Vector types are those of GCC and Clang; every processor has them, some in several registers.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <type_traits>

struct bfloat16 {
  uint16_t bits;  // the upper half of a float
};

template <class T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

#ifdef __AVX512F__
constexpr int REGISTER_BYTES = 64;
#else
constexpr int REGISTER_BYTES = 32;
#endif

// How many numbers of type T a vector has, so that `size` of them are a whole number of vectors.
template <class T>
constexpr int lanes(int size) {
  return std::gcd(size, REGISTER_BYTES / int(sizeof(T)));
}

template <class T, int N>
struct Vectors {
  typedef T type __attribute__((vector_size(N * sizeof(T))));
};
template <class T, int N>
using Vector = typename Vectors<T, N>::type;

template <int N, class T>
inline Vector<Wide<T>, N> load(const T* from) {
  if constexpr (std::is_same_v<T, bfloat16>) {
    Vector<uint16_t, N> halves;
    std::memcpy(&halves, from, sizeof(halves));
    const Vector<uint32_t, N> words = __builtin_convertvector(halves, Vector<uint32_t, N>) << 16;
    Vector<float, N> x;
    std::memcpy(&x, &words, sizeof(x));
    return x;
  } else {
    Vector<T, N> x;
    std::memcpy(&x, from, sizeof(x));
    return __builtin_convertvector(x, Vector<Wide<T>, N>);
  }
}

template <int N, class T>  // to the nearest, ties to even; what is not a number stays that
inline void store(T* to, Vector<Wide<T>, N> x) {
  if constexpr (std::is_same_v<T, bfloat16>) {
    Vector<uint32_t, N> words;
    std::memcpy(&words, &x, sizeof(x));
    words = x != x ? (words >> 16 | 64) : (words + 0x7fff + (words >> 16 & 1)) >> 16;
    const Vector<uint16_t, N> halves = __builtin_convertvector(words, Vector<uint16_t, N>);
    std::memcpy(to, &halves, sizeof(halves));
  } else {
    const Vector<T, N> narrow = __builtin_convertvector(x, Vector<T, N>);
    std::memcpy(to, &narrow, sizeof(narrow));
  }
}

// Of all lanes, by halves.
template <class T, int N>
inline T sum(Vector<T, N> x) {
  if constexpr (N == 1) {
    return x[0];
  } else {
    Vector<T, N / 2> low, high;
    std::memcpy(&low, &x, sizeof(low));
    std::memcpy(&high, reinterpret_cast<const char*>(&x) + sizeof(low), sizeof(high));
    return sum<T, N / 2>(low + high);
  }
}

// Calls `f(number of lanes, first)` for whole vectors of `size` numbers, then for one at a time.
template <class T, class F>
inline void for_lanes(int64_t first, int64_t size, F f) {
  constexpr int FULL = REGISTER_BYTES / int(sizeof(T));
  for (; first + FULL <= size; first += FULL) f(std::integral_constant<int, FULL>(), first);
  for (; first < size; ++first) f(std::integral_constant<int, 1>(), first);
}

// e^x in float to 2 units in the last place, as 2^n times a polynomial of the rest. From -87 down it
// is 1.6e-38. (Cephes, expf.)
template <int N>
inline Vector<float, N> exponential(Vector<float, N> x) {
  const Vector<float, N> least = Vector<float, N>{} - 87.0f, most = Vector<float, N>{} + 88.0f;
  x = x < least ? least : x;  // NaN stays
  x = x > most ? most : x;
  const Vector<float, N> shifted = x * 1.44269504f + 12582912.0f;  // n: low bits of its mantissa
  const Vector<float, N> whole = shifted - 12582912.0f;
  const Vector<float, N> r = x - whole * 0.693359375f + whole * 2.12194440e-4f;
  Vector<float, N> p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  Vector<int32_t, N> bits;
  std::memcpy(&bits, &shifted, sizeof(bits));
  bits = (bits - 0x4B400000 + 127) << 23;
  Vector<float, N> power;
  std::memcpy(&power, &bits, sizeof(bits));
  return p * power;
}

template <int N>
inline Vector<double, N> exponential(Vector<double, N> x) {
  for (int i = 0; i < N; ++i) x[i] = std::exp(x[i]);
  return x;
}
