// A case of the kernel tests, and what the kernels make of it: run() carries out encode, decode, add and reduce on a
// table of pieces, run_all() sum as well, and returns all bytes they produced, having seen to it that they touched no
// others.
#pragma once

#include <cmath>
#include <memory>
#include <string>

#include "guarded.h"

namespace {

const char* const kLevelNames[] = {"scalar", "avx2", "avx512", "neon"};
const char* const kKindNames[] = {"raw", "max-min", "rotated"};
constexpr cgx_means kOracle = {CGX_SCALAR, 1};

struct Case {
  int dtype = CGX_FLOAT32;
  std::vector<cgx_piece> pieces;
  cgx_rounding rounding = {};
  Data data = kOrdinary;
  int64_t n_payloads = 2;
  double scale = 1;
  bool residual = true;
  // Filled in by prepare().
  int64_t numel = 0, slot_nbytes = 0;
  Bytes values;
  std::vector<Bytes> payloads;
};

// Written down apart from the library: how many values an incomplete block of a rotated piece is coded as.
int64_t rotated_block(int64_t numel) {
  int64_t n = 64;
  while (n < numel) n *= 2;
  return n;
}

int64_t quantized_of(const cgx_piece& p) { return p.kind == CGX_RAW ? 0 : p.numel - p.raw_tail; }
int64_t blocks_of(const cgx_piece& p) { return (quantized_of(p) + p.block - 1) / p.block; }
int64_t key_nbytes_of(const cgx_piece& p) { return p.kind == CGX_ROTATED && quantized_of(p) ? 8 : 0; }
int64_t header_nbytes_of(const cgx_piece& p) { return p.kind == CGX_ROTATED ? 4 : 8; }
int64_t coded_of(const cgx_piece& p) {
  const int64_t n = quantized_of(p), rest = n % p.block;
  return p.kind == CGX_ROTATED && rest ? n - rest + rotated_block(rest) : n;
}
int64_t tail_of(const cgx_piece& p) {
  if (!quantized_of(p)) return 0;
  return key_nbytes_of(p) + header_nbytes_of(p) * blocks_of(p) + (coded_of(p) * p.bits + 7) / 8;
}
int64_t nbytes_of(const cgx_piece& p, int dtype) {
  return (tail_of(p) + (p.numel - quantized_of(p)) * kFormats[dtype].nbytes + 7) / 8 * 8;
}

std::string describe(const Case& c) {
  char text[256];
  const cgx_piece& p = c.pieces.front();
  snprintf(text, sizeof text,
           "%s, %s, bits %d, block %d, length %d, raw tail %d, offset %d, payload at %d (%zu pieces), %s, data %d, "
           "%d payloads, scale %.3f%s",
           kFormats[c.dtype].name, kKindNames[p.kind], int(p.bits), int(p.block), int(p.numel), int(p.raw_tail),
           int(p.offset), int(p.payload), c.pieces.size(), c.rounding.stochastic ? "stochastic" : "nearest", c.data,
           int(c.n_payloads), c.scale, c.residual ? ", residual" : "");
  return text;
}

void must(int status) {
  if (status != CGX_OK) fail("status %d instead of CGX_OK", status);
}

// Lays out pieces of these lengths with a few values and bytes between them that belong to nobody.
void lay_out(Case& c, int64_t gap) {
  for (cgx_piece& p : c.pieces) {
    p.offset = c.numel + gap;
    p.payload = c.slot_nbytes + gap;
    if (cgx_piece_payload_nbytes(&p, c.dtype) != nbytes_of(p, c.dtype))
      fail("%s: payload of %d bytes, not %d", describe(c).c_str(), int(cgx_piece_payload_nbytes(&p, c.dtype)),
           int(nbytes_of(p, c.dtype)));
    c.numel = p.offset + p.numel;
    c.slot_nbytes = p.payload + nbytes_of(p, c.dtype);
  }
}

// Data for a laid-out case: values, and payloads to be decoded and reduced, from the oracle.
void prepare(Case& c, uint64_t seed) {
  c.values = make_values(c.dtype, c.numel, c.data, seed);
  now_checking("preparing: %s", describe(c).c_str());
  for (int64_t k = 0; k < c.n_payloads; ++k) {
    const Bytes other = make_values(c.dtype, c.numel, c.data, seed + 77 * uint64_t(k) + 1);
    Bytes payload(size_t(c.slot_nbytes) + 1);  // one more, to have an address even where there are none
    must(cgx_encode(&kOracle, c.dtype, c.pieces.data(), int64_t(c.pieces.size()), other.data(), payload.data(),
                    &c.rounding, nullptr));
    payload.pop_back();
    c.payloads.push_back(payload);
  }
}

// Makes every NaN of the headers the one that encoding writes; what another decodes to is not fixed.
void make_nans_canonical(const Case& c, Bytes& payload) {
  for (const cgx_piece& p : c.pieces)
    for (int64_t at = 0; at < header_nbytes_of(p) * blocks_of(p); at += 4) {
      uint8_t* const header = payload.data() + p.payload + key_nbytes_of(p) + at;
      float number;
      memcpy(&number, header, 4);
      const uint32_t canonical = 0x7FC00000;
      if (std::isnan(number)) memcpy(header, &canonical, 4);
    }
}

struct Product {
  const char* name;
  Bytes bytes;
};

// What of a buffer belongs to pieces, after a check that nothing else in it has changed.
template <class Begin, class Length>
Bytes owned(const Case& c, const Buffer& buffer, const Bytes& before, Begin begin, Length length) {
  const Bytes after = buffer.content();
  Bytes out;
  size_t at = 0;
  const auto unchanged_until = [&](size_t end) {
    for (; at < end; ++at)
      if (after[at] != before[at]) fail("byte %zu, which belongs to no piece, was written", at);
  };
  for (const cgx_piece& p : c.pieces) {
    unchanged_until(size_t(begin(p)));
    out.insert(out.end(), after.begin() + begin(p), after.begin() + begin(p) + length(p));
    at += size_t(length(p));
  }
  unchanged_until(after.size());
  return out;
}

Bytes owned_values(const Case& c, Buffer& buffer, const Bytes& before, bool unify_all) {
  const int64_t item = kFormats[c.dtype].nbytes;
  for (const cgx_piece& p : c.pieces) {
    const int64_t first = unify_all ? 0 : quantized_of(p);
    unify_nans(c.dtype, buffer.data() + (p.offset + first) * item, p.numel - first);
  }
  return owned(
      c, buffer, before, [=](const cgx_piece& p) { return p.offset * item; },
      [=](const cgx_piece& p) { return p.numel * item; });
}

Bytes owned_payload(const Case& c, Buffer& buffer, const Bytes& before, bool unify_raw) {
  for (const cgx_piece& p : c.pieces)
    if (unify_raw) unify_nans(c.dtype, buffer.data() + p.payload + tail_of(p), p.numel - quantized_of(p));
  return owned(
      c, buffer, before, [](const cgx_piece& p) { return p.payload; },
      [&](const cgx_piece& p) { return nbytes_of(p, c.dtype); });
}

Bytes owned_residual(const Case& c, Buffer& buffer, const Bytes& before) {
  return owned(
      c, buffer, before, [](const cgx_piece& p) { return p.offset * 4; },
      [](const cgx_piece& p) { return p.numel * 4; });
}

// The payloads that a sum or a reduction reads.
class Inputs {
 public:
  Inputs(const Case& c, Place place) : payloads_(c.payloads) {
    for (const Bytes& payload : payloads_) {
      buffers_.push_back(std::make_unique<Buffer>(place, payload));
      pointers_.push_back(buffers_.back()->data());
    }
  }
  const uint8_t* const* data() const { return pointers_.data(); }
  void must_be_unchanged(const char* operation) const {
    for (size_t k = 0; k < buffers_.size(); ++k)
      if (buffers_[k]->content() != payloads_[k]) fail("%s changed input %zu", operation, k);
  }

 private:
  const std::vector<Bytes>& payloads_;
  std::vector<std::unique_ptr<Buffer>> buffers_;
  std::vector<const uint8_t*> pointers_;
};

void now_running(const Case& c, cgx_means means, Place place, const char* operation) {
  now_checking("%s, %s with %d threads, placed %d: %s", kLevelNames[means.simd], operation, means.threads, place,
               describe(c).c_str());
}

// Carries out all but sum on a case. `fill` is what output buffers hold before: bytes forgotten by a kernel differ.
std::vector<Product> run(const Case& c, cgx_means means, Place place, uint8_t fill, bool garbage = false) {
  const auto start = [&](const char* operation) { now_running(c, means, place, operation); };
  const cgx_piece* table = c.pieces.data();
  const int64_t count = int64_t(c.pieces.size());
  const Bytes empty_slot(size_t(c.slot_nbytes), fill), empty_values(c.values.size(), fill);
  const Bytes old_residual(size_t(c.numel) * 4, 0x41);
  std::vector<Product> products;

  Buffer residual(place, old_residual);
  float* const lost = c.residual ? reinterpret_cast<float*>(residual.data()) : nullptr;
  {
    start("encode");
    Buffer values(place, c.values), slot(place, empty_slot);
    must(cgx_encode(&means, c.dtype, table, count, values.data(), slot.data(), &c.rounding, lost));
    if (values.content() != c.values) fail("encode changed its input");
    products.push_back({"encode", owned_payload(c, slot, empty_slot, false)});
    products.push_back({"residual of encode", owned_residual(c, residual, old_residual)});
  }
  for (int add = 0; add < 2; ++add) {
    start(add ? "add" : "decode");
    const Bytes& before = add ? c.values : empty_values;
    Buffer payload(place, c.payloads[0]), values(place, before);
    must(cgx_decode(&means, c.dtype, table, count, payload.data(), values.data(), add));
    if (payload.content() != c.payloads[0]) fail("decode changed its input");
    products.push_back({add ? "add" : "decode", owned_values(c, values, before, add || garbage)});
  }
  start("reduce");
  Buffer values(place, c.values), out(place, empty_slot);
  const Inputs inputs(c, place);
  residual.fill(old_residual);
  must(cgx_reduce(&means, c.dtype, table, count, values.data(), inputs.data(), c.n_payloads, c.scale, out.data(),
                  &c.rounding, lost));
  inputs.must_be_unchanged("reduce");
  start("comparing");
  products.push_back({"values of reduce", owned_values(c, values, c.values, false)});
  products.push_back({"payload of reduce", owned_payload(c, out, empty_slot, true)});
  products.push_back({"residual of reduce", owned_residual(c, residual, old_residual)});
  return products;
}

// And sum, whose bytes are no part of the checksum: nobody sends them.
std::vector<Product> run_all(const Case& c, cgx_means means, Place place, uint8_t fill, bool garbage = false) {
  std::vector<Product> products = run(c, means, place, fill, garbage);
  now_running(c, means, place, "sum");
  Buffer values(place, c.values);
  const Inputs inputs(c, place);
  must(cgx_sum(&means, c.dtype, c.pieces.data(), int64_t(c.pieces.size()), values.data(), inputs.data(), c.n_payloads,
               c.scale));
  inputs.must_be_unchanged("sum");
  products.push_back({"sum", owned_values(c, values, c.values, true)});
  return products;
}

void compare(const std::vector<Product>& expected, const std::vector<Product>& got) {
  for (size_t i = 0; i < expected.size(); ++i) {
    const Bytes &a = expected[i].bytes, &b = got[i].bytes;
    for (size_t at = 0; at < a.size(); ++at)
      if (a[at] != b[at])
        fail("%s: byte %zu of %zu is 0x%02x, not 0x%02x", expected[i].name, at, a.size(), b[at], a[at]);
  }
}

}  // namespace
