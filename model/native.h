// What the C++ kernels share: vectors of numbers, the exponential function, bfloat16, and memory in whole cache lines.
//
// F: float, or double for inputs in double. A row of `width` numbers lies in a line of whole vectors.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

using std::int64_t;

// ---------------------------------------- vectors of numbers

#if defined(__AVX512F__)
constexpr int BYTES = 64;
#elif defined(__AVX__)
constexpr int BYTES = 32;
#else
constexpr int BYTES = 16;
#endif

template <class F> struct Lanes;
template <> struct Lanes<float> {
  typedef float Vec __attribute__((vector_size(BYTES)));
  typedef int32_t Int __attribute__((vector_size(BYTES)));
  typedef uint32_t Bits __attribute__((vector_size(BYTES)));
  typedef float Unaligned __attribute__((vector_size(BYTES), aligned(4)));
};
template <> struct Lanes<double> {
  typedef double Vec __attribute__((vector_size(BYTES)));
  typedef double Unaligned __attribute__((vector_size(BYTES), aligned(8)));
};
template <class F> using Vec = typename Lanes<F>::Vec;
template <class F> constexpr int WIDTH = BYTES / sizeof(F);

template <class F> static inline Vec<F> load(const F* p) {
  return *reinterpret_cast<const typename Lanes<F>::Unaligned*>(p);
}
template <class F> static inline void store(F* p, Vec<F> x) { *reinterpret_cast<typename Lanes<F>::Unaligned*>(p) = x; }

template <class F> static int64_t whole(int64_t n) { return (n + WIDTH<F> - 1) / WIDTH<F> * WIDTH<F>; }

// All lanes of x joined by `join`, half with half.
template <int SIZE, class F, class X, class Join> static inline F joined(X x, Join join) {
  if constexpr (SIZE == sizeof(F)) {
    return x[0];
  } else {
    typedef F Half __attribute__((vector_size(SIZE / 2)));
    Half halves[2];
    std::memcpy(halves, &x, SIZE);
    return joined<SIZE / 2, F>(join(halves[0], halves[1]), join);
  }
}
template <class F> static inline F total(Vec<F> x) {
  return joined<BYTES, F>(x, [](auto a, auto b) { return a + b; });
}
template <class F> static inline F largest(Vec<F> x) {
  return joined<BYTES, F>(x, [](auto a, auto b) { return a > b ? a : b; });
}

// exp(x) for x <= 0, to the last bits of a float: the polynomial of Cephes' expf (netlib.org/cephes, single/expf.c).
static inline Vec<float> exponential(Vec<float> x) {
  typedef Lanes<float>::Int Int;
  typedef Lanes<float>::Bits Bits;
  const float magic = 12582912;  // 1.5 x 2^23: adding it rounds to an integer, which the low bits then hold
  Int tiny = x < Vec<float>{} - 87;
  Vec<float> rounded = x * 1.44269504f + magic, n = rounded - magic;
  Vec<float> f = x - n * 0.693359375f + n * 2.12194440e-4f;  // x - n log 2
  Vec<float> p = 1.9875691500e-4f * f + 1.3981999507e-3f;
  p = p * f + 8.3334519073e-3f;
  p = p * f + 4.1665795894e-2f;
  p = p * f + 1.6666665459e-1f;
  p = p * f + 5.0000001201e-1f;
  p = p * f * f + f + 1;
  Bits scaled = reinterpret_cast<Bits>(p) + (reinterpret_cast<Bits>(rounded) << 23);  // may wrap where x is tiny
  return reinterpret_cast<Vec<float>>(scaled & ~reinterpret_cast<Bits>(tiny));
}

static inline Vec<double> exponential(Vec<double> x) {
  for (int i = 0; i < WIDTH<double>; i++) x[i] = std::exp(x[i]);
  return x;
}

// The first `seen` numbers of a row become exp(x - maximum), the others up to `width` zero. Returns the sum, which is made of
// sums of 16 vectors, because the rounding errors of one sum over a long row add up.
template <class F> static F exponentials(F* row, int64_t seen, int64_t width, F& maximum) {
  constexpr int W = WIDTH<F>;
  const int64_t used = whole<F>(seen);
  std::fill(row + seen, row + used, -__builtin_inf());
  Vec<F> top = load(row), sums{};
  for (int64_t j = W; j < used; j += W) {
    Vec<F> x = load(row + j);
    top = x > top ? x : top;
  }
  maximum = largest<F>(top);
  for (int64_t start = 0; start < used; start += 16 * W) {
    Vec<F> part{};
    for (int64_t j = start; j < std::min(start + 16 * W, used); j += W) {
      Vec<F> x = exponential(load(row + j) - maximum);
      store(row + j, x);
      part += x;
    }
    sums += part;
  }
  std::fill(row + used, row + width, F(0));
  return total<F>(sums);
}

template <class F> static void scale(F* row, int64_t width, F factor) {
  for (int64_t j = 0; j < width; j += WIDTH<F>) store(row + j, load(row + j) * factor);
}

// ---------------------------------------- numbers in memory

struct BFloat16 {
  uint16_t bits;
};
static inline float widened(BFloat16 x) {
  uint32_t bits = uint32_t(x.bits) << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}
template <class F> static inline F widened(F x) { return x; }

// Rounded to the nearest, ties to even.
static inline void narrow(BFloat16& to, float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  to.bits = x != x ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
template <class F> static inline void narrow(F& to, F x) { to = x; }

template <class F> struct Memory {
  std::vector<std::vector<F>> pieces;
  size_t used = 0;
  F* take(int64_t size) {  // begins at a multiple of 64 bytes
    if (used == pieces.size()) pieces.emplace_back(size + 64 / sizeof(F));
    auto start = reinterpret_cast<uintptr_t>(pieces[used++].data());
    return reinterpret_cast<F*>((start + 63) / 64 * 64);
  }
};
