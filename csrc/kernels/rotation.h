// The Hadamard rotation of a block, and sums in the order of a tree, written once over a SIMD level.
//
// The order of operations is fixed (docs/wire_format.md), so the stages run from the smallest stride to the largest.
// The first six work on 64 neighbouring values, which stay in registers; later ones work on whole vectors, one or two
// at a time for each pass over the block.
#pragma once

#include "blocks.h"

namespace {

template <class Level>
inline __attribute__((always_inline)) void butterfly(typename Level::Floats& a, typename Level::Floats& b) {
  const typename Level::Floats sum = Level::add(a, b);
  b = Level::sub(a, b);
  a = sum;
}

// The stages of strides 1, 2, ... n / 2 over n vectors.
template <class Level, int n>
inline __attribute__((always_inline)) void butterflies(typename Level::Floats* v) {
  if constexpr (n > 1) {
    butterflies<Level, n / 2>(v);
    butterflies<Level, n / 2>(v + n / 2);
    for (int i = 0; i < n / 2; ++i) butterfly<Level>(v[i], v[i + n / 2]);
  }
}

// The stages of strides 1, 2, ... kLanes / 2, within a vector.
template <class Level, int stride = 1>
inline __attribute__((always_inline)) typename Level::Floats butterflies_within(typename Level::Floats v) {
  if constexpr (stride < Level::kLanes)
    return butterflies_within<Level, 2 * stride>(Level::template butterflies<stride>(v));
  else
    return v;
}

// The stages of strides `stride` and up, as many as Radix is a power of two, of n values. put() gets pairs of vectors.
template <class Level, int Radix, class Put>
inline void stages(const float* v, int64_t n, int64_t stride, Put put) {
  constexpr int lanes = Level::kLanes;
  for (int64_t begin = 0; begin < n; begin += Radix * stride)
    for (int64_t i = begin; i < begin + stride; i += 2 * lanes) {
      typename Level::Floats a[Radix], b[Radix];
      for (int r = 0; r < Radix; ++r) {
        a[r] = Level::load(v + i + r * stride);
        b[r] = Level::load(v + i + r * stride + lanes);
      }
      butterflies<Level, Radix>(a);
      butterflies<Level, Radix>(b);
      for (int r = 0; r < Radix; ++r) put(i + r * stride, a[r], b[r]);
    }
}

// Calls put(i, a, b) with two vectors of H(x) from value i on, for all n values. get(i) returns the vector of x from
// value i on; work has room for n values, which may be those that get() reads and put() writes.
template <class Level, class Get, class Put>
inline void transform(int64_t n, float* work, Get get, Put put) {
  constexpr int lanes = Level::kLanes, tile = kSmallestRotation, vectors = tile / lanes;
  for (int64_t i = 0; i < n; i += tile) {
    typename Level::Floats v[vectors];
    for (int k = 0; k < vectors; ++k) v[k] = butterflies_within<Level>(get(i + k * lanes));
    butterflies<Level, vectors>(v);
    for (int k = 0; k < vectors; ++k) Level::store(work + i + k * lanes, v[k]);
  }
  const auto store = [work](int64_t i, typename Level::Floats a, typename Level::Floats b) {
    Level::store(work + i, a);
    Level::store(work + i + lanes, b);
  };
  int64_t stride = tile;
  for (; 4 * stride < n; stride *= 4) stages<Level, 4>(work, n, stride, store);
  if (4 * stride == n)
    stages<Level, 4>(work, n, stride, put);
  else if (2 * stride == n)
    stages<Level, 2>(work, n, stride, put);
  else
    stages<Level, 1>(work, n, stride, put);
}

// The values of a group, or sums of several groups.
template <class Level>
struct GroupOfFloats {
  typename Level::Floats v[kVectors<Level>];
};

template <class Level>
inline __attribute__((always_inline)) GroupOfFloats<Level> sum_of(const GroupOfFloats<Level>& a,
                                                                  const GroupOfFloats<Level>& b) {
  GroupOfFloats<Level> out;
  for (int v = 0; v < kVectors<Level>; ++v) out.v[v] = Level::add(a.v[v], b.v[v]);
  return out;
}

// The tree of n groups: every step-th from `first` on.
template <class Level, int n, class Get>
inline __attribute__((always_inline)) GroupOfFloats<Level> tree_of_groups(int64_t first, int64_t step, const Get& get) {
  if constexpr (n == 1)
    return get(first * kGroup);
  else
    return sum_of<Level>(tree_of_groups<Level, n / 2>(first, 2 * step, get),
                         tree_of_groups<Level, n / 2>(first + step, 2 * step, get));
}

// tree(v) of n values; get(i) returns the group from value i on, and is called once for each.
template <class Level, class Get>
inline float tree_sum(int64_t n, const Get& get) {
  constexpr int lanes = Level::kLanes, vectors = kVectors<Level>, at_once = 2;
  GroupOfFloats<Level> sums[kLargestRotation / kGroup / at_once];
  int64_t left = n / kGroup / at_once;
  for (int64_t i = 0; i < left; ++i) sums[i] = tree_of_groups<Level, at_once>(i, left, get);
  while (left > 1) {
    left /= 2;
    for (int64_t i = 0; i < left; ++i) sums[i] = sum_of<Level>(sums[i], sums[i + left]);
  }
  static_assert(lanes * vectors == kGroup);
  for (int half = vectors / 2; half > 0; half /= 2)
    for (int v = 0; v < half; ++v) sums[0].v[v] = Level::add(sums[0].v[v], sums[0].v[v + half]);
  return Level::tree(sums[0].v[0]);
}

}  // namespace
