// A stress of both engines for the sanitizers: several threads submit, wait and drop requests while files come and go,
// transfers come up short and the engine is closed under load. Content is verified. Usage: aio_stress DIRECTORY
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <unistd.h>

#include "engine.h"
#include "memory.h"

using namespace infinity::aio;

namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kPages = 512; // of one thread's part of the file
constexpr int kSubmitters = 3;
constexpr int kRounds = 40;

std::atomic<int> owners{0};

struct CountedOwner final : Owner {
    CountedOwner() { ++owners; }
    ~CountedOwner() override { --owners; }
};

// Memory that nobody but the request holds.
struct BufferOwner final : Owner {
    BufferOwner() { buffer.open(); }

    Mapping buffer{kPage, kPage};
};

void check(bool right, const char* what) {
    if (!right) {
        std::fprintf(stderr, "FAILED: %s\n", what);
        std::exit(1);
    }
}

std::string make_file(const std::string& directory, const std::string& name) {
    const std::string path = directory + "/" + name;
    const int fd = ::open(path.c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600);
    check(fd >= 0 && ftruncate(fd, static_cast<off_t>(kSubmitters * kPages * kPage)) == 0, "creating a file");
    ::close(fd);
    return path;
}

std::shared_ptr<Request> request(Op op, std::shared_ptr<File> file, std::uint64_t offset, std::uintptr_t address,
                                 std::size_t nbytes, int priority) {
    return std::make_shared<Request>(op, std::move(file), offset, address, nbytes, nbytes,
                                     static_cast<Priority>(priority), std::make_unique<CountedOwner>());
}

void read_and_forget(Engine& engine, const std::string& path) {
    auto owner = std::make_unique<BufferOwner>();
    const std::uintptr_t address = owner->buffer.address();
    engine.submit(std::make_shared<Request>(Op::read, std::make_shared<File>(path, true), 0, address, kPage, kPage,
                                            Priority::prefetch, std::move(owner)));
}

// The same pages once more, in any order and as one request.
void read_scattered(Engine& engine, const std::shared_ptr<File>& file, std::uint64_t offset, const unsigned char* from,
                    const Mapping& target, std::size_t nbytes) {
    Scatter scatter{{}, kPage};
    for (std::size_t at = 0; at < nbytes; at += kPage) {
        scatter.offsets.push_back(offset + at);
    }
    std::shuffle(scatter.offsets.begin(), scatter.offsets.end(), std::mt19937(static_cast<unsigned>(nbytes)));
    const auto read = std::make_shared<Request>(Op::read, file, scatter, target.address(), nbytes, Priority::demand,
                                                std::make_unique<CountedOwner>());
    engine.submit(read);
    read->wait(-1);
    check(read->outcome().error == 0 && read->outcome().nbytes == nbytes, "a scattered read");
    const auto* const to = reinterpret_cast<const unsigned char*>(target.address());
    for (std::size_t i = 0; i < scatter.offsets.size(); ++i) {
        check(std::memcmp(from + (scatter.offsets[i] - offset), to + i * kPage, kPage) == 0, "a scattered page");
    }
}

// Writes random extents of this thread's part of the file and reads them back.
void submit_and_verify(Engine& engine, const std::string& path, int part) {
    std::mt19937 rng(static_cast<unsigned>(part));
    Mapping source(kPages * kPage, kPage);
    Mapping target(kPages * kPage, kPage);
    source.open();
    target.open();
    auto* const from = reinterpret_cast<unsigned char*>(source.address());
    auto* const to = reinterpret_cast<unsigned char*>(target.address());
    engine.register_buffer(target.address(), target.nbytes());
    for (int round = 0; round < kRounds; ++round) {
        const auto file = std::make_shared<File>(path, false);
        const std::size_t first = rng() % (kPages - 1);
        const std::size_t nbytes = (1 + rng() % (kPages - first)) * kPage;
        const std::uint64_t offset = (static_cast<std::size_t>(part) * kPages + first) * kPage;
        for (std::size_t i = 0; i < nbytes; i += sizeof(unsigned)) {
            const unsigned word = rng();
            std::memcpy(from + i, &word, sizeof word);
        }
        const auto write = request(Op::write, file, offset, source.address(), nbytes, static_cast<int>(rng() % 3));
        engine.submit(write);
        while (!write->wait(0.001)) {
        }
        check(write->outcome().error == 0 && write->outcome().nbytes == nbytes, "a write");
        std::vector<std::shared_ptr<Request>> reads;
        for (std::size_t at = 0; at < nbytes; at += 16 * kPage) {
            const std::size_t length = std::min<std::size_t>(16 * kPage, nbytes - at);
            reads.push_back(request(Op::read, file, offset + at, target.address() + at, length, round % 3));
            engine.submit(reads.back());
        }
        for (const auto& read : reads) {
            engine.promote(read);
            read->wait(-1);
            check(read->outcome().error == 0, "a read");
        }
        check(std::memcmp(from, to, nbytes) == 0, "the content");
        read_scattered(engine, file, offset, from, target, nbytes);
        engine.release_files();
        read_and_forget(engine, path);
    }
}

using Maker = std::unique_ptr<Engine> (*)(const Options&);

void stress(const char* name, Maker make, Options options, const std::string& directory) {
    options.block_nbytes = 8 * kPage;
    options.depth = 8;
    options.threads = 3;
    const auto engine = make(options);
    const std::string path = make_file(directory, name);
    std::vector<std::thread> submitters;
    for (int part = 0; part < kSubmitters; ++part) {
        submitters.emplace_back([&engine, &path, part] { submit_and_verify(*engine, path, part); });
    }
    for (auto& submitter : submitters) {
        submitter.join();
    }
    engine->close();
    check(owners == 0, "an owner outlived its request");
    std::printf("%-8s max_transfer %zu: ok\n", name, options.faults.max_transfer);
    unlink(path.c_str());
}

// Requests race with close(): each is finished or refused, none is left.
void close_under_load(Maker make, const std::string& directory) {
    const std::string path = make_file(directory, "closing");
    Mapping buffer(kPage, kPage);
    buffer.open();
    for (int round = 0; round < 50; ++round) {
        Options options;
        options.depth = 4;
        options.threads = 2;
        const auto engine = make(options);
        std::vector<std::shared_ptr<Request>> accepted;
        std::thread submitter([&] {
            const auto file = std::make_shared<File>(path, false);
            try {
                for (;;) {
                    const auto next = request(Op::write, file, 0, buffer.address(), kPage, 2);
                    engine->submit(next);
                    accepted.push_back(next);
                }
            } catch (const std::logic_error&) { // closed
            }
        });
        std::this_thread::sleep_for(std::chrono::microseconds(200 * (round % 10)));
        engine->close();
        submitter.join();
        for (const auto& one : accepted) {
            check(one->wait(10) && one->outcome().error == 0, "a request accepted before close()");
        }
    }
    unlink(path.c_str());
    std::printf("close under load: ok\n");
}

} // namespace

int main(int argc, char** argv) {
    const std::string directory = argc > 1 ? argv[1] : "/tmp";
    std::vector<std::pair<const char*, Maker>> makers{{"threads", make_thread_engine}};
    try {
        make_uring_engine(Options{})->close();
        makers.emplace_back("io_uring", make_uring_engine);
    } catch (const std::system_error& error) {
        std::printf("io_uring is left out: %s\n", error.what());
    }
    for (const auto& [name, make] : makers) {
        Options options;
        stress(name, make, options, directory);
        options.faults.max_transfer = 3 * kPage;
        options.faults.interrupt_every = 11;
        options.faults.again_every = 13;
        stress(name, make, options, directory);
        close_under_load(make, directory);
    }
}
