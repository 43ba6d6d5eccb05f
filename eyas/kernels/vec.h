// Eight floats that behave alike everywhere: AVX2 with FMA and F16C where the compiler may use them, plain C++
// elsewhere.
//
// Compile with -ffp-contract=off: a multiply-add is fused exactly where `fma` is written, so that every copy of a loop
// that the compiler makes computes the same bits.
#pragma once

#include <cstdint>
#include <cstring>

#include <c10/util/Half.h>

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#include <immintrin.h>

struct Vec8 {
  __m256 v;

  static Vec8 zero() { return {_mm256_setzero_ps()}; }
  static Vec8 all(float x) { return {_mm256_set1_ps(x)}; }
  static Vec8 load(const float* p) { return {_mm256_loadu_ps(p)}; }
  static Vec8 load(const c10::Half* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
  }
  static Vec8 load(const int8_t* p) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))))};
  }
  void store(float* p) const { _mm256_storeu_ps(p, v); }
};

static inline Vec8 operator+(Vec8 a, Vec8 b) { return {_mm256_add_ps(a.v, b.v)}; }
static inline Vec8 operator*(Vec8 a, Vec8 b) { return {_mm256_mul_ps(a.v, b.v)}; }
static inline Vec8 fma(Vec8 a, Vec8 b, Vec8 c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
static inline Vec8 operator/(Vec8 a, Vec8 b) { return {_mm256_div_ps(a.v, b.v)}; }
static inline Vec8 max(Vec8 a, Vec8 b) { return {_mm256_max_ps(a.v, b.v)}; }
static inline Vec8 min(Vec8 a, Vec8 b) { return {_mm256_min_ps(a.v, b.v)}; }
static inline Vec8 round(Vec8 a) {
  return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// 2^n for whole n in [-126, 127].
static inline Vec8 pow2(Vec8 n) {
  const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(biased, 23))};
}
// a where x >= floor, else 0.
static inline Vec8 keep_from(Vec8 a, Vec8 x, float floor) {
  return {_mm256_and_ps(a.v, _mm256_cmp_ps(x.v, _mm256_set1_ps(floor), _CMP_GE_OQ))};
}
// The sums of four vectors' lanes, each ((l0+l1)+(l2+l3)) + ((l4+l5)+(l6+l7)), to out[0..3].
static inline void fold4(Vec8 a, Vec8 b, Vec8 c, Vec8 d, float* out) {
  const __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps(a.v, b.v), _mm256_hadd_ps(c.v, d.v));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
}
static inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

// The first `count` (0..8) floats of p, the rest zero; and back.
static inline __m256i first_lanes(int64_t count) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
static inline Vec8 load_some(const float* p, int64_t count) { return {_mm256_maskload_ps(p, first_lanes(count))}; }
static inline void store_some(Vec8 a, float* p, int64_t count) { _mm256_maskstore_ps(p, first_lanes(count), a.v); }

#else

#include <cmath>

struct Vec8 {
  float v[8];

  static Vec8 zero() { return all(0.f); }
  static Vec8 all(float x) {
    Vec8 r;
    for (float& f : r.v) f = x;
    return r;
  }
  template <typename T>
  static Vec8 load(const T* p) {
    Vec8 r;
    for (int i = 0; i < 8; ++i) r.v[i] = static_cast<float>(p[i]);
    return r;
  }
  void store(float* p) const { std::memcpy(p, v, sizeof v); }
};

template <typename F>
static inline Vec8 lanes(F f) {
  Vec8 r;
  for (int i = 0; i < 8; ++i) r.v[i] = f(i);
  return r;
}
static inline Vec8 operator+(Vec8 a, Vec8 b) { return lanes([&](int i) { return a.v[i] + b.v[i]; }); }
static inline Vec8 operator*(Vec8 a, Vec8 b) { return lanes([&](int i) { return a.v[i] * b.v[i]; }); }
static inline Vec8 operator/(Vec8 a, Vec8 b) { return lanes([&](int i) { return a.v[i] / b.v[i]; }); }
static inline Vec8 fma(Vec8 a, Vec8 b, Vec8 c) { return lanes([&](int i) { return a.v[i] * b.v[i] + c.v[i]; }); }
static inline Vec8 max(Vec8 a, Vec8 b) { return lanes([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; }); }
static inline Vec8 min(Vec8 a, Vec8 b) { return lanes([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; }); }
static inline Vec8 round(Vec8 a) { return lanes([&](int i) { return std::nearbyint(a.v[i]); }); }
static inline Vec8 pow2(Vec8 n) { return lanes([&](int i) { return std::ldexp(1.f, static_cast<int>(n.v[i])); }); }
static inline Vec8 keep_from(Vec8 a, Vec8 x, float floor) {
  return lanes([&](int i) { return x.v[i] >= floor ? a.v[i] : 0.f; });
}
static inline float fold(Vec8 a) {
  return ((a.v[0] + a.v[1]) + (a.v[2] + a.v[3])) + ((a.v[4] + a.v[5]) + (a.v[6] + a.v[7]));
}
static inline void fold4(Vec8 a, Vec8 b, Vec8 c, Vec8 d, float* out) {
  out[0] = fold(a), out[1] = fold(b), out[2] = fold(c), out[3] = fold(d);
}
static inline void prefetch(const void*) {}
static inline Vec8 load_some(const float* p, int64_t count) {
  return lanes([&](int i) { return i < count ? p[i] : 0.f; });
}
static inline void store_some(Vec8 a, float* p, int64_t count) {
  std::memcpy(p, a.v, static_cast<size_t>(count) * sizeof(float));
}

#endif

// e^x (Cephes' polynomial), 0 below -87 and e^88 above 88.
static inline Vec8 exp(Vec8 x) {
  constexpr float kLowest = -87.f, kHighest = 88.f;
  const Vec8 clamped = min(max(x, Vec8::all(kLowest)), Vec8::all(kHighest));
  const Vec8 n = round(clamped * Vec8::all(1.44269504f));
  Vec8 r = fma(n, Vec8::all(-0.693359375f), clamped);
  r = fma(n, Vec8::all(2.12194440e-4f), r);
  Vec8 poly = Vec8::all(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    poly = fma(poly, r, Vec8::all(c));
  poly = fma(poly, r * r, r) + Vec8::all(1.f);
  return keep_from(poly * pow2(n), x, kLowest);
}
