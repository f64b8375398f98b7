// Stands in for the compiler's <immintrin.h> where the AVX-512 kernels are tested without the instructions: every
// intrinsic is SIMDe's portable version of it (Debian: libsimde-dev). Those that SIMDe 0.7.4 lacks are here, lane by
// lane, as Intel's guide describes them.
#pragma once

#define SIMDE_NO_NATIVE
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>

#include <cmath>
#include <cstdint>
#include <cstring>

using __mmask16 = uint16_t;

// Sixteen lanes of From, each through f, as sixteen lanes of To.
template <class From, class To, class Out, class In, class F>
inline Out cgx_each_lane(const In& in, F f) {
  static_assert(sizeof(In) == 16 * sizeof(From) && sizeof(Out) == 16 * sizeof(To));
  From from[16];
  To to[16];
  Out out;
  std::memcpy(from, &in, sizeof from);
  for (int i = 0; i < 16; ++i) to[i] = static_cast<To>(f(from[i]));
  std::memcpy(&out, to, sizeof out);
  return out;
}

inline __m512i _mm512_cvtepu8_epi32(__m128i a) {
  return cgx_each_lane<uint8_t, int32_t, __m512i>(a, [](uint8_t x) { return x; });
}
inline __m512i _mm512_cvtepu16_epi32(__m256i a) {
  return cgx_each_lane<uint16_t, int32_t, __m512i>(a, [](uint16_t x) { return x; });
}
inline __m128i _mm512_cvtepi32_epi8(__m512i a) {
  return cgx_each_lane<uint32_t, uint8_t, __m128i>(a, [](uint32_t x) { return x; });
}
inline __m256i _mm512_cvtepi32_epi16(__m512i a) {
  return cgx_each_lane<uint32_t, uint16_t, __m256i>(a, [](uint32_t x) { return x; });
}
inline __m512 _mm512_cvtepi32_ps(__m512i a) {
  return cgx_each_lane<int32_t, float, __m512>(a, [](int32_t x) { return x; });
}

// What does not fit is the "integer indefinite".
inline int32_t cgx_to_int(float whole) {
  return whole >= -0x1p31f && whole < 0x1p31f ? static_cast<int32_t>(whole) : INT32_MIN;
}
inline __m512i _mm512_cvttps_epi32(__m512 a) {
  return cgx_each_lane<float, int32_t, __m512i>(a, [](float x) { return cgx_to_int(std::trunc(x)); });
}
inline __m512i _mm512_cvtps_epi32(__m512 a) {
  return cgx_each_lane<float, int32_t, __m512i>(a, [](float x) { return cgx_to_int(std::nearbyint(x)); });
}

inline __m512 _mm512_cvtph_ps(__m256i a) {
  __m128i half[2];
  std::memcpy(half, &a, sizeof a);
  const __m256 wide[2] = {_mm256_cvtph_ps(half[0]), _mm256_cvtph_ps(half[1])};
  __m512 out;
  std::memcpy(&out, wide, sizeof out);
  return out;
}
inline __m256i cgx_cvtps_ph(__m512 a) {
  __m256 half[2];
  std::memcpy(half, &a, sizeof a);
  const __m128i narrow[2] = {_mm256_cvtps_ph(half[0], 0), _mm256_cvtps_ph(half[1], 0)};
  __m256i out;
  std::memcpy(&out, narrow, sizeof out);
  return out;
}
#define _mm512_cvtps_ph(a, nearest) cgx_cvtps_ph(a)

// They fault where the address is not that of a cache line; so does this.
inline void _mm512_stream_si512(void* p, __m512i a) {
  if (reinterpret_cast<uintptr_t>(p) % 64 != 0) __builtin_trap();
  std::memcpy(p, &a, sizeof a);
}
inline void _mm512_stream_ps(void* p, __m512 a) { _mm512_stream_si512(p, _mm512_castps_si512(a)); }

// Like the instructions they are made of, these give the second of two operands where one is NaN.
template <class Better>
inline float cgx_reduce(__m512 a, Better better) {
  float lane[16];
  std::memcpy(lane, &a, sizeof a);
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lane[i] = better(lane[i], lane[i + half]) ? lane[i] : lane[i + half];
  return lane[0];
}
inline float _mm512_reduce_min_ps(__m512 a) {
  return cgx_reduce(a, [](float x, float y) { return x < y; });
}
inline float _mm512_reduce_max_ps(__m512 a) {
  return cgx_reduce(a, [](float x, float y) { return x > y; });
}
inline int32_t _mm512_reduce_max_epi32(__m512i a) {
  int32_t lane[16];
  std::memcpy(lane, &a, sizeof a);
  int32_t most = lane[0];
  for (const int32_t x : lane) most = x > most ? x : most;
  return most;
}

// Lane i of the result is lane from(i) of a.
template <class From>
inline __m512 cgx_permuted(__m512 a, From from) {
  float in[16], out[16];
  std::memcpy(in, &a, sizeof a);
  for (int i = 0; i < 16; ++i) out[i] = in[from(i)];
  __m512 permuted;
  std::memcpy(&permuted, out, sizeof permuted);
  return permuted;
}
inline __m512 _mm512_permute_ps(__m512 a, int order) {
  return cgx_permuted(a, [=](int i) { return i / 4 * 4 + (order >> 2 * (i % 4) & 3); });
}
// With two operands, the result's low half is of the first and its high half of the second. The kernels give one twice.
inline __m512 _mm512_shuffle_f32x4(__m512 a, __m512 b, int order) {
  if (std::memcmp(&a, &b, sizeof a) != 0) __builtin_trap();
  return cgx_permuted(a, [=](int i) { return (order >> 2 * (i / 4) & 3) * 4 + i % 4; });
}
inline __m256 _mm512_extractf32x8_ps(__m512 a, int half) {
  __m256 halves[2];
  std::memcpy(halves, &a, sizeof a);
  return halves[half];
}

// SIMDe's compares with 0, and so leaves a NaN its sign.
#undef _mm512_abs_ps
inline __m512 _mm512_abs_ps(__m512 a) {
  uint32_t lane[16];
  std::memcpy(lane, &a, sizeof a);
  for (uint32_t& bits : lane) bits &= 0x7FFFFFFF;
  std::memcpy(&a, lane, sizeof a);
  return a;
}
