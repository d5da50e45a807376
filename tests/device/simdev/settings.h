// What the emulated device costs, holds and checks: numbers that Python sets by name between two steps.
#pragma once

#include <cstddef>
#include <utility>

namespace infinity::simdev {

constexpr std::size_t kMappedBytes = std::size_t{32} << 30; // address space; memory is taken when it is touched
constexpr std::size_t kSmallBytes = 256;                    // flags, norms, losses: computed even by hollow kernels,
constexpr std::size_t kLargeBytes = 1 << 16;                // unless they are made of more than this

struct Settings {
    // Rates are a second; 0 is as fast as it goes.
    double flops = 0;
    double memory_rate = 0; // bytes that kernels read and write
    double h2d = 0;         // bytes up the link
    double d2h = 0;         // bytes down the link
    double launch_us = 0;   // of each kernel
    double link_us = 0;     // of each copy over the link

    double capacity = kMappedBytes; // bytes

    double hollow = 0; // kernels take their time and compute nothing but small results
    double copy = 1;   // 0: copies take their time and copy nothing
    double poison = 1; // memory that is new or was freed holds NaN
    double check = 0;  // report a host that touches a copy's memory before the copy is done
    double sync = 0;   // the host waits for every kernel
    double trace = 0;  // keep what ran when
    double verbose = 0;
};

inline Settings& settings() {
    static auto* all = new Settings;
    return *all;
}

inline constexpr std::pair<const char*, double Settings::*> kNames[] = {
    {"flops", &Settings::flops},
    {"memory_rate", &Settings::memory_rate},
    {"h2d", &Settings::h2d},
    {"d2h", &Settings::d2h},
    {"launch_us", &Settings::launch_us},
    {"link_us", &Settings::link_us},
    {"hollow", &Settings::hollow},
    {"capacity", &Settings::capacity},
    {"copy", &Settings::copy},
    {"poison", &Settings::poison},
    {"check", &Settings::check},
    {"sync", &Settings::sync},
    {"trace", &Settings::trace},
    {"verbose", &Settings::verbose},
};

} // namespace infinity::simdev
