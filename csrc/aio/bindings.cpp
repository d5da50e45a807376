// infinity._aio: the native I/O engines and address ranges.
#include <algorithm>
#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "engine.h"
#include "memory.h"

namespace py = pybind11;

namespace infinity::aio {

namespace {

constexpr double kSignalCheck_s = 0.1;

double seconds(Clock::time_point time) {
    return std::chrono::duration<double>(time.time_since_epoch()).count();
}

// Keeps a Python object alive as long as a request. The engine's threads never hold the GIL, so they only put the
// reference into a list; the next call from Python drops it.
class PythonOwner final : public Owner {
  public:
    explicit PythonOwner(py::object object) : object_(object.release()) {}

    ~PythonOwner() override {
        const std::lock_guard lock(mutex());
        dropped().push_back(object_);
    }

    // Does not wait for the lock: after fork() it may be locked forever, and the next call can collect as well.
    static void collect() {
        std::vector<py::handle> batch;
        {
            const std::unique_lock lock(mutex(), std::try_to_lock);
            if (!lock) {
                return;
            }
            batch.swap(dropped());
        }
        for (const py::handle object : batch) {
            object.dec_ref();
        }
    }

  private:
    static std::mutex& mutex() {
        static auto* const instance = new std::mutex; // outlives every engine thread
        return *instance;
    }
    static std::vector<py::handle>& dropped() {
        static auto* const instance = new std::vector<py::handle>;
        return *instance;
    }

    py::handle object_;
};

std::shared_ptr<Request> submit(Engine& engine, bool write, std::shared_ptr<File> file, std::uint64_t offset,
                                std::uintptr_t address, std::size_t nbytes, std::size_t memory_nbytes, int priority,
                                py::object owner) {
    PythonOwner::collect();
    if (nbytes != 0 && memory_nbytes == 0) {
        throw std::invalid_argument("a request without memory");
    }
    auto request =
        std::make_shared<Request>(write ? Op::write : Op::read, std::move(file), offset, address, nbytes, memory_nbytes,
                                  static_cast<Priority>(priority), std::make_unique<PythonOwner>(std::move(owner)));
    engine.submit(request);
    return request;
}

// Submits blocks at `offsets` (a buffer of 64-bit integers, such as a numpy array), which use the memory repeatedly.
std::shared_ptr<Request> submit_blocks(Engine& engine, bool write, std::shared_ptr<File> file,
                                       const py::buffer& offsets, std::size_t block_nbytes, std::uintptr_t address,
                                       std::size_t memory_nbytes, int priority, py::object owner) {
    PythonOwner::collect();
    const py::buffer_info info = offsets.request();
    if (info.ndim != 1 || info.itemsize != sizeof(std::uint64_t) || info.strides[0] != info.itemsize) {
        throw std::invalid_argument("offsets must be a contiguous array of 64-bit integers");
    }
    if (block_nbytes == 0 || memory_nbytes == 0 || memory_nbytes % block_nbytes != 0) {
        throw std::invalid_argument("the memory must be a multiple of the block size");
    }
    const auto* const first = static_cast<const std::uint64_t*>(info.ptr);
    Scatter scatter{{first, first + info.size}, block_nbytes};
    auto request = std::make_shared<Request>(write ? Op::write : Op::read, std::move(file), std::move(scatter), address,
                                             memory_nbytes, static_cast<Priority>(priority),
                                             std::make_unique<PythonOwner>(std::move(owner)));
    engine.submit(request);
    return request;
}

// Waits without the GIL, and regularly lets Python handle signals: Ctrl-C ends the wait, not the request.
bool wait(Request& request, double timeout_s) {
    if (request.orphaned()) {
        throw std::logic_error("this request belongs to the parent process; the child cannot wait for it");
    }
    const auto start = Clock::now();
    for (;;) {
        const double waited_s = std::chrono::duration<double>(Clock::now() - start).count();
        const double slice_s = timeout_s < 0 ? kSignalCheck_s : std::min(kSignalCheck_s, timeout_s - waited_s);
        bool done = request.done();
        if (!done) {
            const py::gil_scoped_release release;
            done = request.wait(std::max(0.0, slice_s));
        }
        PythonOwner::collect();
        if (done || (timeout_s >= 0 && slice_s < kSignalCheck_s)) {
            return done;
        }
        if (PyErr_CheckSignals() != 0) {
            throw py::error_already_set();
        }
    }
}

// An engine is not deleted in a forked child: its condition variables count the parent's waiting threads, and their
// destructors would wait for these forever.
struct EngineDeleter {
    void operator()(Engine* engine) const {
        if (!engine->forked()) {
            delete engine;
        }
    }
};

void close(Engine& engine) {
    {
        const py::gil_scoped_release release;
        engine.close();
    }
    PythonOwner::collect();
}

Engine* make_engine(const std::string& backend, std::size_t block_nbytes, int depth, int threads, bool sqpoll,
                    bool iopoll, const py::dict& faults) {
    Options options;
    options.block_nbytes = block_nbytes;
    options.depth = depth;
    options.threads = threads;
    options.sqpoll = sqpoll;
    options.iopoll = iopoll;
    for (const auto& [key, value] : faults) {
        const auto name = key.cast<std::string>();
        if (name == "max_transfer") {
            options.faults.max_transfer = value.cast<std::size_t>();
        } else if (name == "error") {
            options.faults.error = value.cast<int>();
        } else if (name == "error_at") {
            options.faults.error_at = value.cast<long>();
        } else if (name == "interrupt_every") {
            options.faults.interrupt_every = value.cast<int>();
        } else if (name == "again_every") {
            options.faults.again_every = value.cast<int>();
        } else {
            throw std::invalid_argument("unknown fault " + name);
        }
    }
    if (backend == "io_uring") {
        return make_uring_engine(options).release();
    }
    if (backend == "threads") {
        return make_thread_engine(options).release();
    }
    throw std::invalid_argument("unknown backend " + backend);
}

void register_requests(py::module_& m) {
    py::class_<File, std::shared_ptr<File>>(m, "File")
        .def(py::init<const std::string&, bool, bool>(), py::arg("path"), py::arg("read_only"),
             py::arg("direct") = true)
        .def_property_readonly("direct", &File::direct)
        .def_property_readonly("alignment", &File::alignment);

    py::class_<Request, std::shared_ptr<Request>>(m, "Request")
        .def("done", &Request::done)
        .def("wait", &wait, py::arg("timeout_s"))
        .def("outcome",
             [](const Request& request) {
                 const Outcome outcome = request.outcome();
                 return py::make_tuple(outcome.nbytes, outcome.error, outcome.offset);
             })
        .def("times", [](const Request& request) {
            const Times times = request.times();
            return py::make_tuple(seconds(times.submitted), seconds(times.started), seconds(times.finished));
        });
}

void register_engines(py::module_& m) {
    py::class_<Engine, std::unique_ptr<Engine, EngineDeleter>>(m, "Engine")
        .def(py::init(&make_engine), py::arg("backend"), py::arg("block_nbytes"), py::arg("depth"), py::arg("threads"),
             py::arg("sqpoll") = false, py::arg("iopoll") = false, py::arg("faults") = py::dict())
        .def("submit", &submit, py::arg("write"), py::arg("file"), py::arg("offset"), py::arg("address"),
             py::arg("nbytes"), py::arg("memory_nbytes"), py::arg("priority"), py::arg("owner"))
        .def("submit_blocks", &submit_blocks, py::arg("write"), py::arg("file"), py::arg("offsets"),
             py::arg("block_nbytes"), py::arg("address"), py::arg("memory_nbytes"), py::arg("priority"),
             py::arg("owner"))
        .def("promote", &Engine::promote, py::arg("request"))
        .def("register_buffer", &Engine::register_buffer, py::arg("address"), py::arg("nbytes"),
             py::call_guard<py::gil_scoped_release>())
        .def("release_files", &Engine::release_files)
        .def("close", &close)
        .def("stats",
             [](const Engine& engine) {
                 const Stats stats = engine.stats();
                 return py::make_tuple(stats.bytes_read, stats.bytes_written, stats.blocks, stats.fixed_blocks);
             })
        .def("latencies", [](const Engine& engine) {
            return py::make_tuple(engine.latencies(Op::read), engine.latencies(Op::write));
        });
    m.def("has_uring", &has_uring);
}

void register_memory(py::module_& m) {
    py::class_<Mapping>(m, "Mapping")
        .def(py::init<std::size_t, std::size_t>(), py::arg("nbytes"), py::arg("alignment"))
        .def_property_readonly("address", &Mapping::address)
        .def_property_readonly("nbytes", &Mapping::nbytes)
        .def("open", &Mapping::open, py::call_guard<py::gil_scoped_release>())
        .def("shut", &Mapping::shut, py::call_guard<py::gil_scoped_release>())
        .def("park", &Mapping::park, py::call_guard<py::gil_scoped_release>())
        .def("open_with", &Mapping::open_with, py::arg("parked"), py::call_guard<py::gil_scoped_release>());
}

// Converts std::system_error into OSError with its errno.
void register_errors() {
    py::register_exception_translator([](std::exception_ptr raised) {
        try {
            std::rethrow_exception(std::move(raised));
        } catch (const std::system_error& error) {
            const py::tuple arguments = py::make_tuple(error.code().value(), error.what());
            PyErr_SetObject(PyExc_OSError, arguments.ptr());
        }
    });
}

} // namespace

PYBIND11_MODULE(_aio, m) {
    m.doc() = "Native I/O engines and address ranges.";
    register_errors();
    register_requests(m);
    register_engines(m);
    register_memory(m);
}

} // namespace infinity::aio
