// Values that travel unquantized: the tails of pieces, and raw pieces. In a payload they may start at any
// byte, so they are read with memcpy or with a level's loads, which do not care.
#pragma once

#include <algorithm>

#include "numerics.h"

namespace {

template <class T>
inline T read_raw(const uint8_t* p, int64_t i) {
  T v;
  std::memcpy(&v, p + i * static_cast<int64_t>(sizeof v), sizeof v);
  return v;
}

template <class Level, class T>
inline typename Level::Floats load_raw(const uint8_t* p, int64_t i) {
  return Level::load(reinterpret_cast<const T*>(p + i * static_cast<int64_t>(sizeof(T))));
}

template <class Level, class T>
void add_raw(const uint8_t* payload, T* values, int64_t n) {
  int64_t i = 0;
  for (; i + Level::kLanes <= n; i += Level::kLanes)
    Level::store(values + i, Level::add(Level::load(values + i), load_raw<Level, T>(payload, i)));
  for (; i < n; ++i) from_float(to_float(values[i]) + to_float(read_raw<T>(payload, i)), values + i);
}

template <class Level>
void add_raw(const uint8_t* payload, double* values, int64_t n) {
  for (int64_t i = 0; i < n; ++i) values[i] += read_raw<double>(payload, i);
}

// values = (values + sum of payloads) * scale, copied to out, unless that is null. `at`: byte offset of the first value
// in every payload.
template <class Level, class T>
void reduce_raw(T* values, const uint8_t* const* payloads, int64_t n_payloads, int64_t at, int64_t n, double scale,
                uint8_t* out) {
  const float narrow = static_cast<float>(scale);
  const auto scales = Level::splat(narrow);
  int64_t i = 0;
  for (; i + Level::kLanes <= n; i += Level::kLanes) {
    auto total = Level::load(values + i);
    for (int64_t k = 0; k < n_payloads; ++k) total = Level::add(total, load_raw<Level, T>(payloads[k] + at, i));
    total = Level::mul(total, scales);
    Level::store(values + i, total);
    if (out) Level::store(reinterpret_cast<T*>(out + i * static_cast<int64_t>(sizeof(T))), total);
  }
  for (; i < n; ++i) {
    float total = to_float(values[i]);
    for (int64_t k = 0; k < n_payloads; ++k) total = total + to_float(read_raw<T>(payloads[k] + at, i));
    from_float(total * narrow, values + i);
    if (out) std::memcpy(out + i * static_cast<int64_t>(sizeof(T)), values + i, sizeof(T));
  }
}

template <class Level>
void reduce_raw(double* values, const uint8_t* const* payloads, int64_t n_payloads, int64_t at, int64_t n, double scale,
                uint8_t* out) {
  constexpr int64_t tile = 1024;  // stays in L1 from the first payload to the copy
  for (int64_t start = 0; start < n; start += tile) {
    const int64_t end = std::min(n, start + tile);
    for (int64_t k = 0; k < n_payloads; ++k)
      for (int64_t i = start; i < end; ++i) values[i] += read_raw<double>(payloads[k] + at, i);
    for (int64_t i = start; i < end; ++i) values[i] *= scale;
    if (out)
      std::memcpy(out + start * static_cast<int64_t>(sizeof(double)), values + start,
                  static_cast<size_t>(end - start) * sizeof(double));
  }
}

}  // namespace
