// Holds every SIMD level to the bytes of the scalar one, in memory that faults when it is left by a byte.
//
//   kernels_test [--quick]
//
// --quick is for slow emulators. Stand-alone, over the C ABI alone. Levels, threads and places in memory must not
// change what run_all() (cases.h) returns, and the scalar level's bytes must be the same on every architecture.
#include <cfenv>
#include <cmath>
#include <iterator>

#include "cases.h"
#include "quick.h"

namespace {

std::vector<int> levels;  // all that this processor has
int64_t cases = 0;        // of the group under way

void check(const Case& c, const std::vector<int>& threads, const std::vector<Place>& places, bool garbage = false) {
  const std::vector<Product> expected = run_all(c, kOracle, places.front(), 0x00, garbage);
  for (int level : levels)
    for (int n : threads)
      for (Place place : places) compare(expected, run_all(c, {level, n}, place, 0xA5, garbage));
  ++cases;
}

// A codec of so many bits per value.
struct Width {
  int64_t kind, bits;
  // A test's block size, or an allowed one that is larger, since what is small for max-min is not allowed here.
  int64_t block(int64_t block) const {
    return kind == CGX_ROTATED ? std::min<int64_t>(rotated_block(4 * block), 4096) : block;
  }
};

Case single(int dtype, Width width, int64_t block, int64_t numel, int64_t raw_tail, bool stochastic) {
  Case c;
  c.dtype = dtype;
  c.pieces = {{0, numel, 0, raw_tail, block, width.bits, width.kind}};
  c.rounding = {0x1234567890ABCDEFull + uint64_t(numel), 7, 3, 1, stochastic};
  return c;
}

std::vector<int64_t> lengths_around(int64_t block) {
  std::vector<int64_t> out = {0,  1,  2,  3,  5,  7,  8,  9,  13, 15, 16, 17, 23,
                              25, 31, 32, 33, 40, 47, 61, 63, 64, 65, 96, 97};
  for (int64_t n : {block - 1, block, block + 1, 2 * block - 1, 2 * block + 8, 3 * block + 5})
    if (n > 97) out.push_back(n);
  return out;
}

constexpr int64_t kBlocks[] = {1, 2, 3, 7, 8, 9, 31, 32, 33, 64, 100, 512, 1000, 1024, 2049, 4096, 65536};
constexpr int64_t kRotatedBlocks[] = {64, 128, 256, 512, 1024, 2048, 4096};
constexpr Width kRaw = {CGX_RAW, 32};
constexpr Width kWidths[] = {{CGX_MAXMIN, 1},  {CGX_MAXMIN, 2},  {CGX_MAXMIN, 3},
                             {CGX_MAXMIN, 4},  {CGX_MAXMIN, 5},  {CGX_MAXMIN, 6},
                             {CGX_MAXMIN, 7},  {CGX_MAXMIN, 8},  kRaw,
                             {CGX_ROTATED, 1}, {CGX_ROTATED, 2}, {CGX_ROTATED, 3},
                             {CGX_ROTATED, 4}};

std::vector<int64_t> blocks_for(Width width) {
  return width.kind == CGX_ROTATED ? std::vector<int64_t>(std::begin(kRotatedBlocks), std::end(kRotatedBlocks))
                                   : std::vector<int64_t>(std::begin(kBlocks), std::end(kBlocks));
}

// Every width, type, block and length in both roundings. What else can vary takes turns.
void widths_types_blocks_lengths() {
  uint64_t turn = 0;
  for (int dtype = 0; dtype < 4; ++dtype)
    for (Width width : kWidths)
      for (int64_t block : blocks_for(width))
        for (int64_t numel : lengths_around(block))
          for (int stochastic = 0; stochastic < 2; ++stochastic) {
            ++turn;
            if (dtype == CGX_FLOAT64 && width.kind != CGX_RAW) continue;
            if (quick && (turn % 11 != 0 || numel > 5000)) continue;
            const int64_t tails[] = {0, 0, numel % block, std::min<int64_t>(numel, 11)};
            Case c = single(dtype, width, block, numel, tails[turn % 4], stochastic);
            c.data = static_cast<Data>(turn % kDataKinds);
            c.residual = turn % 3 != 0;
            c.scale = turn % 5 < 2 ? 1.0 / 3 : 1;
            lay_out(c, int64_t(turn % 7));
            prepare(c, turn);
            check(c, {1}, {kPlaces[turn % 3]});
          }
}

void reductions_of_1_2_and_5() {
  for (int dtype = 0; dtype < 4; ++dtype)
    for (Width width : kWidths)
      for (int64_t about : {7, 64, 1024})
        for (int64_t n_payloads : {1, 2, 5})
          for (double scale : {1.0, 1.0 / 3})
            for (int variant = 0; variant < 4; ++variant) {
              if (dtype == CGX_FLOAT64 && width.kind != CGX_RAW) continue;
              if (quick && (width.bits + variant) % 4 != 0) continue;
              const int64_t block = width.block(about);
              Case c = single(dtype, width, block, 2 * block + 21, variant % 2 ? 21 : 0, variant / 2);
              c.n_payloads = n_payloads;
              c.scale = scale;
              c.residual = variant % 2;
              lay_out(c, 1);
              prepare(c, uint64_t(width.bits + variant));
              check(c, {1, 2}, {kEnd, kStart});
            }
}

void every_kind_of_data() {
  for (int dtype = 0; dtype < 3; ++dtype)
    for (Width width : kWidths)
      for (int64_t about : {5, 32, 512})
        for (int data = 0; data < kDataKinds; ++data)
          for (int stochastic = 0; stochastic < 2; ++stochastic) {
            if (quick && about == 512) continue;
            const int64_t block = width.block(about);
            Case c = single(dtype, width, block, 3 * block + 9, stochastic ? 9 : 0, stochastic);
            c.data = static_cast<Data>(data);
            lay_out(c, 3);
            prepare(c, uint64_t(data));
            check(c, {1}, {kEnd, kStart, kHeap});
          }
}

Case mixed_table(uint64_t seed, int64_t largest) {
  Random random(seed);
  Case c;
  c.dtype = int(random.below(3));
  c.data = random.below(2) ? kPatches : kOrdinary;
  c.rounding = {seed, 1, 2, 0, int64_t(random.below(2))};
  c.residual = random.below(2);
  for (int64_t n = 1 + random.below(6); n > 0; --n) {
    const Width width = kWidths[random.below(std::size(kWidths))];
    const int64_t block = width.block(kBlocks[random.below(15)]), numel = random.below(largest);
    c.pieces.push_back({0, numel, 0, random.below(2) ? numel % block : 0, block, width.bits, width.kind});
  }
  lay_out(c, 1 + random.below(9));
  return c;
}

void tables_of_pieces() {
  for (uint64_t seed = 1; seed <= (quick ? 40 : 600); ++seed) {
    Case c = mixed_table(seed, 900);
    prepare(c, seed);
    check(c, {1, 2}, {kPlaces[seed % 3]});
  }
}

// Long enough that a call is really shared between threads.
void threads_1_2_and_3() {
  const int64_t largest = quick ? 100000 : 400000;
  for (uint64_t seed = 1; seed <= (quick ? 2 : 12); ++seed) {
    Case c = mixed_table(seed, largest);
    c.pieces.resize(2);
    c.pieces[0] = {0, largest - 1, 0, 0, seed % 2 ? 33 : 1024, int64_t(1 + seed % 8), CGX_MAXMIN};
    c.pieces[1] = {0, largest / 2 + 7, 0, 0, seed % 2 ? 65536 : 100, 4, seed % 4 ? CGX_MAXMIN : CGX_RAW};
    if (seed % 3 == 0) c.pieces[1] = {0, largest / 2 + 7, 0, 0, seed % 2 ? 4096 : 64, 3, CGX_ROTATED};
    c.numel = c.slot_nbytes = 0;
    lay_out(c, 3);
    prepare(c, seed);
    check(c, {1, 2, 3}, {kEnd});
  }
}

// Random bytes lead no level outside; all levels make the same of them, but for headers of strange NaNs.
void payloads_of_garbage() {
  for (uint64_t seed = 1; seed <= (quick ? 60 : 1500); ++seed) {
    Case c = mixed_table(seed, 300);
    prepare(c, seed);
    for (Bytes& payload : c.payloads) payload = make_garbage(c.slot_nbytes, seed + 1000);
    for (int level : levels) run_all(c, {level, 2}, kPlaces[seed % 3], 0xA5);
    for (Bytes& payload : c.payloads) make_nans_canonical(c, payload);
    check(c, {1, 2}, {kPlaces[seed % 3]}, true);
  }
}

// So many values that decoding may write past the caches, at addresses that suit vectors and at others.
void values_beyond_the_caches() {
  for (int dtype = 0; dtype < 3; ++dtype)
    for (int64_t gap : {0, 1}) {
      Case c = single(dtype, {CGX_MAXMIN, 4}, dtype ? 1024 : 500, (int64_t{17} << 20) / kFormats[dtype].nbytes + 32, 0,
                      false);
      lay_out(c, gap);
      const Bytes payload = make_garbage(c.slot_nbytes, uint64_t(dtype)),
                  before(size_t(c.numel * kFormats[dtype].nbytes));
      Bytes first;
      for (int level : levels)
        for (int threads : {1, 3}) {
          now_checking("%s with %d threads, decode: %s", kLevelNames[level], threads, describe(c).c_str());
          const cgx_means means = {level, threads};
          Buffer slot(kEnd, payload), values(kEnd, before);
          must(cgx_decode(&means, dtype, c.pieces.data(), 1, slot.data(), values.data(), 0));
          const Bytes made = owned_values(c, values, before, true);
          if (first.empty()) first = made;
          compare({{"decode", first}}, {{"decode", made}});
        }
      ++cases;
      if (quick) break;
    }
}

// The kernels index by offset, so a pointer far before a small buffer stands in for a huge tensor.
void random_numbers_past_2_to_the_32() {
  for (int64_t before : {1, 8, 31, 64, 100})
    for (int64_t block : {64, 100, 1024}) {
      const int64_t offset = (int64_t{1} << 32) - before, numel = 300;
      const cgx_piece piece = {offset, numel, 0, 0, block, 5, CGX_MAXMIN};
      const cgx_rounding rounding = {5, 6, 7, 1, 1};
      const Bytes values = make_values(CGX_FLOAT32, numel, kOrdinary, 3);
      Bytes first;
      for (int level : levels) {
        now_checking("%s, encode of %d values from 2^32 - %d on, block %d", kLevelNames[level], int(numel), int(before),
                     int(block));
        Buffer x(kEnd, values), slot(kEnd, Bytes(size_t(nbytes_of(piece, CGX_FLOAT32))));
        const cgx_means means = {level, 1};
        const uintptr_t base = reinterpret_cast<uintptr_t>(x.data()) - uintptr_t(offset) * 4;
        must(cgx_encode(&means, CGX_FLOAT32, &piece, 1, reinterpret_cast<const void*>(base), slot.data(), &rounding,
                        nullptr));
        if (first.empty()) first = slot.content();
        compare({{"encode", first}}, {{"encode", slot.content()}});
      }
      ++cases;
    }
}

// Rounding that the caller has set on its thread neither changes bytes nor is changed, however many threads run.
void the_callers_rounding_mode() {
  for (int mode : {FE_UPWARD, FE_TOWARDZERO}) {
    Case c = mixed_table(9, 900);
    c.pieces.assign(2, {0, quick ? 70000 : 400000, 0, 0, 512, 4, CGX_MAXMIN});
    c.numel = c.slot_nbytes = 0;
    lay_out(c, 3);
    prepare(c, 9);
    const std::vector<Product> expected = run_all(c, kOracle, kEnd, 0x00);
    for (int level : levels)
      for (int n = 1; n <= 3; ++n) {
        fesetround(mode);
        const std::vector<Product> got = run_all(c, {level, n}, kEnd, 0xA5);
        const int after = fegetround();
        fesetround(FE_TONEAREST);
        compare(expected, got);
        if (after != mode) fail("the caller's rounding mode was changed");
      }
    ++cases;
  }
}

// What a float16, bfloat16 or float32 is as a float32.
float widened(const Bytes& values, int dtype, int64_t i) {
  const Format& f = kFormats[dtype];
  uint64_t bits = 0;
  memcpy(&bits, values.data() + i * f.nbytes, size_t(f.nbytes));
  const int64_t exponent = int64_t(bits >> f.mantissa_bits) & ((1 << f.exponent_bits) - 1);
  const int64_t mantissa = int64_t(bits & ((1ull << f.mantissa_bits) - 1)) | (exponent ? 1ll << f.mantissa_bits : 0);
  const int lowest = 2 - (1 << (f.exponent_bits - 1)) - f.mantissa_bits;
  const float size = std::ldexp(float(mantissa), lowest + int(exponent ? exponent - 1 : 0));
  return bits >> (f.exponent_bits + f.mantissa_bits) ? -size : size;
}

// The quantized values of a case's only piece, decoded but not rounded to its dtype.
std::vector<float> decoded(const Case& c, const Bytes& payload) {
  const cgx_piece& p = c.pieces[0];
  const cgx_piece wide = {0, quantized_of(p), 0, 0, p.block, p.bits, p.kind};
  std::vector<float> out(size_t(wide.numel));
  must(cgx_decode(&kOracle, CGX_FLOAT32, &wide, 1, payload.data(), out.data(), 0));
  return out;
}

// residual = value - decoded, 0 for raw values, untouched in NaN blocks; that of a reduction divided by the scale.
void residuals_say_what_was_lost() {
  for (int dtype = 0; dtype < 3; ++dtype)
    for (Width width : kWidths)
      for (int64_t block : {9, 64, 512})
        for (Data data : {kOrdinary, kBad})
          for (double scale : {1.0, 0.25}) {
            if (width.kind == CGX_ROTATED) continue;
            Case c = single(dtype, width, block, 4 * block + 5, 5, false);
            c.data = data;
            c.scale = scale;
            lay_out(c, 0);
            prepare(c, uint64_t(block + width.bits));
            const std::vector<Product> made = run(c, kOracle, kHeap, 0x00);
            now_checking("scalar, residual: %s", describe(c).c_str());
            const int64_t quantized = quantized_of(c.pieces[0]);
            std::vector<float> sum, encoded = decoded(c, made[0].bytes), reduced = decoded(c, made[5].bytes);
            for (int64_t i = 0; i < quantized; ++i) sum.push_back(widened(c.values, dtype, i));
            const std::vector<float> own = sum;
            for (const Bytes& payload : c.payloads) {
              const std::vector<float> other = decoded(c, payload);
              for (int64_t i = 0; i < quantized; ++i) sum[size_t(i)] += other[size_t(i)];
            }
            const auto hold = [&](const char* what, const Bytes& residual, int64_t i, float before, float after) {
              float got, untouched;
              memcpy(&got, residual.data() + i * 4, 4);
              memset(&untouched, 0x41, 4);
              const float expected = i >= quantized ? 0.0f : std::isnan(after) ? untouched : before - after;
              if (memcmp(&got, &expected, 4) != 0) fail("%s: %d is %g, not %g", what, int(i), got, expected);
            };
            for (int64_t i = 0; i < c.pieces[0].numel; ++i) {
              const size_t at = size_t(std::min(i, std::max<int64_t>(quantized - 1, 0)));
              hold("encode", made[1].bytes, i, quantized ? own[at] : 0, quantized ? encoded[at] : 0);
              // A power of two: the scale rounds nothing.
              const float lost = quantized ? reduced[at] / float(scale) : 0;
              hold("reduce", made[6].bytes, i, quantized ? sum[at] : 0, lost);
            }
            ++cases;
          }
}

// sum = (values + payloads[0] + payloads[1] + ...) * scale, each operation rounded to float32 by itself: of the
// quantized values of float32 tensors, which nothing rounds any more.
void sums_are_own_values_and_then_payloads_in_order() {
  for (int64_t bits = 1; bits <= 8; ++bits)
    for (int64_t block : {9, 64, 512})
      for (int64_t n_payloads : {1, 2, 5})
        for (double scale : {1.0, 1.0 / 3}) {
          Case c = single(CGX_FLOAT32, {CGX_MAXMIN, bits}, block, 4 * block + 5, 5, false);
          c.n_payloads = n_payloads;
          c.scale = scale;
          lay_out(c, 0);
          prepare(c, uint64_t(block + bits));
          const Bytes made = run_all(c, kOracle, kHeap, 0x00).back().bytes;
          now_checking("scalar, sum: %s", describe(c).c_str());
          std::vector<std::vector<float>> others;
          for (const Bytes& payload : c.payloads) others.push_back(decoded(c, payload));
          for (int64_t i = 0; i < quantized_of(c.pieces[0]); ++i) {
            float expected = widened(c.values, CGX_FLOAT32, i), got;
            for (const std::vector<float>& other : others) expected += other[size_t(i)];
            expected *= float(scale);
            memcpy(&got, made.data() + i * 4, 4);
            if (memcmp(&got, &expected, 4) != 0) fail("%d is %g, not %g", int(i), got, expected);
          }
          ++cases;
        }
}

void wrong_arguments_are_refused() {
  const Case good = [] {
    Case c = single(CGX_FLOAT32, {CGX_MAXMIN, 4}, 32, 100, 0, false);
    lay_out(c, 0);
    prepare(c, 1);
    return c;
  }();
  const auto refused = [&](const char* what, cgx_means means, int dtype, cgx_piece piece, int64_t n_payloads) {
    now_checking("%s", what);
    Buffer values(kEnd, good.values), slot(kEnd, good.payloads[0]);
    const uint8_t* payload = slot.data();
    if (n_payloads && (cgx_encode(&means, dtype, &piece, 1, values.data(), slot.data(), &good.rounding, nullptr) >= 0 ||
                       cgx_decode(&means, dtype, &piece, 1, slot.data(), values.data(), 0) >= 0))
      fail("encode or decode took it");
    if (cgx_reduce(&means, dtype, &piece, 1, values.data(), &payload, n_payloads, 1, slot.data(), &good.rounding,
                   nullptr) >= 0)
      fail("reduce took it");
    if (cgx_sum(&means, dtype, &piece, 1, values.data(), &payload, n_payloads, 1) >= 0) fail("sum took it");
    if (values.content() != good.values || slot.content() != good.payloads[0]) fail("refused, but something written");
    ++cases;
  };
  const cgx_piece p = good.pieces[0];
  const auto with = [&](int64_t cgx_piece::* field, int64_t value) {
    cgx_piece changed = p;
    changed.*field = value;
    return changed;
  };
  for (int simd : {-1, 4, 1000}) refused("a level that does not exist", {simd, 1}, CGX_FLOAT32, p, 1);
  for (int simd = 0; simd < 4; ++simd)
    if (!cgx_simd_available(simd)) refused("a level that the processor lacks", {simd, 1}, CGX_FLOAT32, p, 1);
  for (int dtype : {-1, 5}) refused("a type that does not exist", kOracle, dtype, p, 1);
  refused("float64 at 4 bits", kOracle, CGX_FLOAT64, p, 1);
  refused("bytes at 4 bits", kOracle, CGX_BYTES, p, 1);
  for (int64_t bits : {-1, 0, 9, 31, 33, 64}) refused("bits", kOracle, CGX_FLOAT32, with(&cgx_piece::bits, bits), 1);
  for (int64_t block : {-1, 0}) refused("block", kOracle, CGX_FLOAT32, with(&cgx_piece::block, block), 1);
  for (int64_t tail : {-1, 101}) refused("raw tail", kOracle, CGX_FLOAT32, with(&cgx_piece::raw_tail, tail), 1);
  refused("numel", kOracle, CGX_FLOAT32, with(&cgx_piece::numel, -1), 1);
  refused("offset", kOracle, CGX_FLOAT32, with(&cgx_piece::offset, -1), 1);
  refused("payload", kOracle, CGX_FLOAT32, with(&cgx_piece::payload, -1), 1);
  refused("a reduction or a sum of nothing", kOracle, CGX_FLOAT32, p, 0);
  for (int64_t kind : {-1, 3, 15, 16, 1000}) refused("codec", kOracle, CGX_FLOAT32, with(&cgx_piece::kind, kind), 1);
  const auto rotated = [&](int64_t block, int64_t bits) {
    cgx_piece changed = p;
    changed.block = block, changed.bits = bits, changed.kind = CGX_ROTATED;
    return changed;
  };
  for (int64_t bits : {0, 5, 8, 32}) refused("bits, rotated", kOracle, CGX_FLOAT32, rotated(64, bits), 1);
  for (int64_t block : {0, 1, 32, 63, 65, 96, 1000, 8192})
    refused("block, rotated", kOracle, CGX_FLOAT32, rotated(block, 4), 1);
  refused("float64, rotated", kOracle, CGX_FLOAT64, rotated(64, 4), 1);
  refused("bytes, rotated", kOracle, CGX_BYTES, rotated(64, 4), 1);
}

// Bytes are copied as they are, by any number of threads, and never summed up.
void bytes_are_copied() {
  for (const int64_t numel : {int64_t{1}, int64_t{7}, int64_t{4097}, int64_t{300001}})
    for (const int threads : {1, 3}) {
      now_checking("%lld bytes, %d threads", static_cast<long long>(numel), threads);
      const cgx_means means{cgx_best_simd(), threads};
      const cgx_piece piece{3, numel, 8, numel, 1, 32, CGX_RAW};
      const Bytes sent = make_garbage(numel + 3, uint64_t(numel)), zeros(size_t(numel + 3));
      const int64_t slot_nbytes = cgx_piece_payload_nbytes(&piece, CGX_BYTES) + 8;
      Buffer slot(kEnd, Bytes(size_t(slot_nbytes), uint8_t{255})), values(kEnd, zeros);
      const uint8_t* payload = slot.data();
      must(cgx_encode(&means, CGX_BYTES, &piece, 1, sent.data(), slot.data(), nullptr, nullptr));
      must(cgx_decode(&means, CGX_BYTES, &piece, 1, slot.data(), values.data(), 0));
      Bytes expected = sent;
      std::fill(expected.begin(), expected.begin() + 3, uint8_t{0});
      if (values.content() != expected) fail("other bytes came out");
      for (int64_t i = 8 + numel; i < slot_nbytes; ++i)
        if (slot.data()[i] != 0) fail("padding is not cleared");
      if (cgx_decode(&means, CGX_BYTES, &piece, 1, slot.data(), values.data(), 1) >= 0) fail("decode added them");
      if (cgx_sum(&means, CGX_BYTES, &piece, 1, values.data(), &payload, 1, 1) >= 0) fail("sum took them");
      if (cgx_reduce(&means, CGX_BYTES, &piece, 1, values.data(), &payload, 1, 1, slot.data(), nullptr, nullptr) >= 0)
        fail("reduce took them");
      ++cases;
    }
}

// What checksum() returns on every architecture. It changes with the wire format and with its cases, and with nothing
// else.
constexpr uint64_t kChecksum = 0x844AC4AA581F8BF2ull, kRotatedChecksum = 0x9DD0802693D46B4Dull;

// FNV-1a over everything that the scalar level makes of cases that never change, but for sums.
uint64_t checksum(bool rotated) {
  uint64_t hash = 0xCBF29CE484222325ull;
  for (int dtype = 0; dtype < 4; ++dtype)
    for (Width width : kWidths)
      for (int64_t about : {7, 64, 1000})
        for (int data = 0; data < kDataKinds; ++data) {
          if ((width.kind == CGX_ROTATED) != rotated || (dtype == CGX_FLOAT64 && width.kind != CGX_RAW)) continue;
          const int64_t block = width.block(about);
          Case c = single(dtype, width, block, block + 37, data % 2 ? 37 : 0, data / 2 % 2);
          c.data = static_cast<Data>(data);
          c.scale = data % 3 ? 1 : 1.0 / 3;
          lay_out(c, 1);
          prepare(c, uint64_t(width.bits * 100 + data));
          for (const Product& product : run(c, kOracle, kHeap, 0x00))
            for (uint8_t byte : product.bytes) hash = (hash ^ byte) * 0x100000001B3ull;
        }
  return hash;
}

struct Group {
  const char* name;
  void (*check)();
};
constexpr Group kGroups[] = {
    {"every width, type, block and length", widths_types_blocks_lengths},
    {"reductions of 1, 2 and 5 payloads", reductions_of_1_2_and_5},
    {"every kind of data", every_kind_of_data},
    {"tables of pieces", tables_of_pieces},
    {"1, 2 and 3 threads", threads_1_2_and_3},
    {"values beyond the caches", values_beyond_the_caches},
    {"payloads of garbage", payloads_of_garbage},
    {"random numbers past 2^32 values", random_numbers_past_2_to_the_32},
    {"the caller's rounding mode", the_callers_rounding_mode},
    {"residuals say what was lost", residuals_say_what_was_lost},
    {"sums are own values and then payloads in order", sums_are_own_values_and_then_payloads_in_order},
    {"wrong arguments are refused", wrong_arguments_are_refused},
    {"bytes are copied", bytes_are_copied},
};

}  // namespace

int main(int argc, char** argv) {
  read_arguments(argc, argv);
  if (cgx_abi_version() != CGX_ABI_VERSION) fail("ABI %d, not %d", cgx_abi_version(), CGX_ABI_VERSION);
  name_the_check_on_a_fault();
  printf("levels:");
  for (int simd = 0; simd < 4; ++simd)
    if (cgx_simd_available(simd)) {
      levels.push_back(simd);
      printf(" %s", kLevelNames[simd]);
    }
  printf(", best %s\n", kLevelNames[cgx_best_simd()]);
  for (const Group& group : kGroups) {
    cases = 0;
    group.check();
    printf("ok: %s (%d cases)\n", group.name, int(cases));
    fflush(stdout);
  }
  for (const bool rotated : {false, true}) {
    const auto sum = static_cast<unsigned long long>(checksum(rotated));
    if (sum != (rotated ? kRotatedChecksum : kChecksum))
      fail("the scalar level's bytes%s have checksum %016llx, not that of other architectures",
           rotated ? " of rotated pieces" : "", sum);
  }
  return 0;
}
