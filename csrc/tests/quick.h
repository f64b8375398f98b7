// The one option of the native tests: --quick runs fewer cases.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>

inline bool quick = false;

inline void read_arguments(int argc, char** argv) {
  if (argc > 2 || (argc == 2 && std::strcmp(argv[1], "--quick") != 0)) {
    std::fprintf(stderr, "usage: %s [--quick]\n", argv[0]);
    std::exit(2);
  }
  quick = argc == 2;
}
