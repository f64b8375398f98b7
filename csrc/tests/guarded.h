// What the kernel tests are made of: memory whose edges bite, data without a library's random numbers, and words for
// failures. Nothing here knows the kernels.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <csignal>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

#include "cgx.h"

using Bytes = std::vector<uint8_t>;

// What is being checked, for the message when it fails or faults.
inline char current_check[512] = "nothing yet";

__attribute__((format(printf, 1, 2))) inline void now_checking(const char* format, ...) {
  va_list list;
  va_start(list, format);
  vsnprintf(current_check, sizeof current_check, format, list);
  va_end(list);
}

__attribute__((format(printf, 1, 2), noreturn)) inline void fail(const char* format, ...) {
  fflush(stdout);
  fprintf(stderr, "FAILED: %s\n  ", current_check);
  va_list list;
  va_start(list, format);
  vfprintf(stderr, format, list);
  va_end(list);
  fputc('\n', stderr);
  _exit(1);
}

inline void say_what_was_checked() {
  static const char text[] = "FAULT while checking: ";
  if (write(STDERR_FILENO, text, sizeof text - 1) < 0 ||
      write(STDERR_FILENO, current_check, strlen(current_check)) < 0 || write(STDERR_FILENO, "\n", 1) < 0)
    return;
}

inline void on_fault(int) {
  say_what_was_checked();
  _exit(1);
}

// AddressSanitizer has handlers of its own, which show the stack; it and its sister end by SIGABRT where told to.
inline void name_the_check_on_a_fault() {
#if !defined(__SANITIZE_ADDRESS__)
  for (int number : {SIGSEGV, SIGBUS, SIGILL, SIGFPE}) signal(number, on_fault);
#endif
  signal(SIGABRT, on_fault);
}

// Where a buffer lies: its end at an inaccessible page, its start right behind one, or on the heap, for what the
// sanitizers and valgrind know of the heap.
enum Place { kEnd, kStart, kHeap };
constexpr Place kPlaces[] = {kEnd, kStart, kHeap};

// Bytes that fault, or are found out, when somebody touches what lies around them.
class Buffer {
 public:
  Buffer(Place place, size_t nbytes) : place_(place), nbytes_(nbytes) {
    if (place == kHeap) {
      data_ = static_cast<uint8_t*>(malloc(nbytes));
      if (!data_ && nbytes) fail("no memory");
      return;
    }
    const size_t page = page_nbytes();
    middle_ = (nbytes + page - 1) / page * page;
    mapping_ = take(middle_);
    data_ = mapping_ + page + (place == kEnd ? middle_ - nbytes : 0);
    for_each_slack_byte([](uint8_t* p) { *p = kCanary; });
  }
  Buffer(Place place, const Bytes& content) : Buffer(place, content.size()) { fill(content); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() {
    if (place_ == kHeap) {
      free(data_);
      return;
    }
    for_each_slack_byte([this](uint8_t* p) {
      if (*p != kCanary) fail("wrote at %td of a buffer of %zu bytes", p - data_, nbytes_);
    });
    unused().emplace(middle_, mapping_);
  }
  uint8_t* data() const { return data_; }
  void fill(const Bytes& content) {
    if (!content.empty()) memcpy(data_, content.data(), content.size());
  }
  Bytes content() const { return Bytes(data_, data_ + nbytes_); }

 private:
  static constexpr uint8_t kCanary = 0xC9;
  static constexpr size_t kSlack = 128;

  static size_t page_nbytes() {
    static const size_t value = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    return value;
  }
  static std::multimap<size_t, uint8_t*>& unused() {
    static std::multimap<size_t, uint8_t*> mappings;
    return mappings;
  }
  static uint8_t* take(size_t middle) {
    const auto found = unused().find(middle);
    if (found != unused().end()) {
      uint8_t* mapping = found->second;
      unused().erase(found);
      return mapping;
    }
    void* mapping = mmap(nullptr, middle + 2 * page_nbytes(), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapping == MAP_FAILED) fail("no memory");
    uint8_t* start = static_cast<uint8_t*>(mapping);
    if (middle && mprotect(start + page_nbytes(), middle, PROT_READ | PROT_WRITE) != 0) fail("mprotect");
    return start;
  }
  template <class F>
  void for_each_slack_byte(F f) {
    uint8_t* const first = mapping_ + page_nbytes();
    uint8_t* const last = first + middle_;
    uint8_t* const end = data_ + nbytes_;
    for (uint8_t* p = data_ - first > static_cast<ptrdiff_t>(kSlack) ? data_ - kSlack : first; p < data_; ++p) f(p);
    for (uint8_t* p = end; p < last && p < end + kSlack; ++p) f(p);
  }

  Place place_;
  size_t nbytes_, middle_ = 0;
  uint8_t *mapping_ = nullptr, *data_ = nullptr;
};

// splitmix64: the same everywhere.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15ull + 1) {}
  uint64_t next() {
    uint64_t z = state_ += 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
  }
  int64_t below(int64_t n) { return static_cast<int64_t>((next() >> 1) % static_cast<uint64_t>(n)); }

 private:
  uint64_t state_;
};

// An IEEE format, for making and recognizing values without converting any.
struct Format {
  const char* name;
  int nbytes, exponent_bits, mantissa_bits;
};
constexpr Format kFormats[] = {
    {"float32", 4, 8, 23}, {"float16", 2, 5, 10}, {"bfloat16", 2, 8, 7}, {"float64", 8, 11, 52}};

enum Data { kOrdinary, kZeros, kConstant, kSubnormal, kHuge, kAnything, kBad, kPatches, kDataKinds };

inline uint64_t make_value(const Format& f, Data data, Random& random) {
  const uint64_t top = (1ull << f.exponent_bits) - 1, bias = top / 2;
  const uint64_t mantissa = random.next() & ((1ull << f.mantissa_bits) - 1), sign = random.next() & 1;
  const auto value = [&](uint64_t exponent) {
    return sign << (f.exponent_bits + f.mantissa_bits) | exponent << f.mantissa_bits | mantissa;
  };
  switch (data) {
    case kZeros:
      return sign << (f.exponent_bits + f.mantissa_bits);  // both zeros
    case kConstant:
      return (bias << f.mantissa_bits) | 5;
    case kSubnormal:
      return value(0);
    case kHuge:
      return value(top - 1);
    case kAnything:
      return value(random.next() % top);
    case kBad:  // NaN (also signalling) and, with a mantissa of 0, infinity
      if (random.below(40) == 0) return value(top) & (random.below(2) ? ~0ull : ~((1ull << f.mantissa_bits) - 1));
      [[fallthrough]];
    default:
      return value(bias - 6 + random.next() % 9);
  }
}

inline Bytes make_values(int dtype, int64_t numel, Data data, uint64_t seed) {
  const Format& format = kFormats[dtype];
  Random random(seed);
  Bytes out(static_cast<size_t>(numel * format.nbytes));
  Data kind = data;
  for (int64_t i = 0; i < numel; ++i) {
    if (data == kPatches && i % 13 == 0) kind = static_cast<Data>(random.below(kPatches));
    const uint64_t bits = make_value(format, kind, random);
    memcpy(out.data() + i * format.nbytes, &bits, static_cast<size_t>(format.nbytes));  // little-endian, as the wire
  }
  return out;
}

inline Bytes make_garbage(int64_t nbytes, uint64_t seed) {
  Random random(seed);
  Bytes out(static_cast<size_t>(nbytes));
  for (uint8_t& byte : out) byte = static_cast<uint8_t>(random.next());
  return out;
}

// Which NaN comes out of a sum is not fixed (docs/wire_format.md): makes them all one.
inline void unify_nans(int dtype, uint8_t* values, int64_t numel) {
  const Format& f = kFormats[dtype];
  const uint64_t sign_less = (1ull << (f.exponent_bits + f.mantissa_bits)) - 1;
  const uint64_t infinity = ((1ull << f.exponent_bits) - 1) << f.mantissa_bits;
  for (int64_t i = 0; i < numel; ++i) {
    uint64_t bits = 0;
    memcpy(&bits, values + i * f.nbytes, static_cast<size_t>(f.nbytes));
    if ((bits & sign_less) > infinity) memset(values + i * f.nbytes, 0xFF, static_cast<size_t>(f.nbytes));
  }
}
