// Encode, decode, reduce and sum of one part of one piece: a codec's blocks (maxmin.h, rotated.h), then what is sent
// raw (raw.h).
#pragma once

#include "maxmin.h"
#include "raw.h"
#include "rotated.h"

namespace {

// ---- the functions of a level's table: one part of one piece ----

// The raw values of a span, and the zeros behind the last.
struct RawPart {
  int64_t first;
  int64_t n;
  RawPart(const PieceParts& parts, Span span)
      : first(std::max(span.first, parts.quantized)), n(std::max<int64_t>(0, span.end - first)) {}
};

inline void clear_padding(uint8_t* payload, const cgx_piece& piece, const PieceParts& parts, Span span,
                          int64_t item_nbytes) {
  if (span.end < piece.numel) return;
  const int64_t used = parts.tail + (piece.numel - parts.quantized) * item_nbytes;
  if (used < parts.nbytes) std::memset(payload + used, 0, static_cast<size_t>(parts.nbytes - used));
}

inline void no_loss(float* residual, const RawPart& raw) {
  if (residual) std::fill(residual + raw.first, residual + raw.first + raw.n, 0.0f);
}

template <class Level, class T>
void encode(const EncodeTask& task, const cgx_piece& piece, Span span) {
  constexpr int64_t item = sizeof(T);
  const PieceParts parts(piece, item);
  const T* x = static_cast<const T*>(task.values) + piece.offset;
  uint8_t* payload = task.slot + piece.payload;
  float* residual = task.residual ? task.residual + piece.offset : nullptr;
  if constexpr (item <= 4) {
    if (span.first < parts.quantized)
      piece.kind == CGX_ROTATED ? encode_rotated<Level>(task, piece, parts, span, x, residual)
                                : encode_maxmin<Level>(task, piece, parts, span, x, residual);
  }
  const RawPart raw(parts, span);
  if (raw.n > 0)
    std::memcpy(payload + parts.tail + (raw.first - parts.quantized) * item, x + raw.first,
                static_cast<size_t>(raw.n * item));
  no_loss(residual, raw);
  clear_padding(payload, piece, parts, span, item);
}

template <class Level, Writing writing, class T>
void decode_part(const cgx_piece& piece, const PieceParts& parts, Span span, const uint8_t* payload, T* x) {
  piece.kind == CGX_ROTATED ? decode_rotated<Level, writing>(piece, parts, span, payload, x)
                            : decode_blocks<Level, writing>(piece, parts, span, payload, x);
}

template <class Level, class T>
void decode(const DecodeTask& task, const cgx_piece& piece, Span span) {
  constexpr int64_t item = sizeof(T);
  const PieceParts parts(piece, item);
  T* x = static_cast<T*>(task.values) + piece.offset;
  const uint8_t* payload = task.slot + piece.payload;
  if constexpr (item <= 4) {
    if (span.first < parts.quantized) {
      const bool aligned = (reinterpret_cast<uintptr_t>(x) | static_cast<uint64_t>(piece.block * item)) % 64 == 0;
      if (task.writing == Writing::kAdd)
        decode_part<Level, Writing::kAdd>(piece, parts, span, payload, x);
      else if (task.writing == Writing::kStream && aligned)
        decode_part<Level, Writing::kStream>(piece, parts, span, payload, x);
      else
        decode_part<Level, Writing::kStore>(piece, parts, span, payload, x);
    }
  }
  const RawPart raw(parts, span);
  if (raw.n == 0) return;
  const uint8_t* tail = payload + parts.tail + (raw.first - parts.quantized) * item;
  if (task.writing == Writing::kAdd)
    add_raw<Level>(tail, x + raw.first, raw.n);
  else
    std::memcpy(x + raw.first, tail, static_cast<size_t>(raw.n * item));
}

template <class Level, class T>
void reduce(const ReduceTask& task, const cgx_piece& piece, Span span) {
  constexpr int64_t item = sizeof(T);
  const PieceParts parts(piece, item);
  T* x = static_cast<T*>(task.values) + piece.offset;
  uint8_t* out = task.slot + piece.payload;
  float* residual = task.residual ? task.residual + piece.offset : nullptr;
  if constexpr (item <= 4) {
    if (span.first < parts.quantized)
      piece.kind == CGX_ROTATED ? reduce_rotated<Level>(task, piece, parts, span, x, residual)
                                : reduce_maxmin<Level>(task, piece, parts, span, x, residual);
  }
  const RawPart raw(parts, span);
  if (raw.n > 0) {
    const int64_t at = parts.tail + (raw.first - parts.quantized) * item;
    reduce_raw<Level>(x + raw.first, task.payloads, task.n_payloads, piece.payload + at, raw.n, task.scale, out + at);
  }
  no_loss(residual, raw);
  clear_padding(out, piece, parts, span, item);
}

template <class Level, class T>
void sum(const SumTask& task, const cgx_piece& piece, Span span) {
  constexpr int64_t item = sizeof(T);
  const PieceParts parts(piece, item);
  T* x = static_cast<T*>(task.values) + piece.offset;
  if constexpr (item <= 4) {
    if (span.first < parts.quantized)
      piece.kind == CGX_ROTATED
          ? sum_rotated<Level>(task, piece, parts, span, x)
          : sum_blocks<Level>(piece, parts, span, x, task, cgx_scratch(std::min(kSegment, parts.quantized)));
  }
  const RawPart raw(parts, span);
  if (raw.n > 0) {
    const int64_t at = piece.payload + parts.tail + (raw.first - parts.quantized) * item;
    reduce_raw<Level>(x + raw.first, task.payloads, task.n_payloads, at, raw.n, task.scale, nullptr);
  }
}

}  // namespace
