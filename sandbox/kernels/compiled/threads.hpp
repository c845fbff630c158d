// Parallel loops: a pool of threads that sleeps when there is nothing to do.
//
// A loop is cut into independent parts, and each free thread claims the next one: a thread that gets no time from the
// machine delays only the part that it holds. A part computes the same numbers on any thread, and sums over parts are
// added in their order: no bit depends on the number of threads. (Threads that spin at barriers, as OpenMP's do, take 30
// to 90 times as long when the machine is shared.)
#pragma once

#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <system_error>
#include <thread>

class Pool {
   public:
    // Calls work(p) for every p < parts, on the calling thread and at most `helpers` others; returns when all are done. A
    // second caller at the same time works alone. Must not be called from inside `work`.
    void run(long helpers, long parts, const std::function<void(long)>& work) {
        std::unique_lock<std::mutex> own(busy_, std::try_to_lock);
        if (!own) {
            for (long p = 0; p < parts; p++) work(p);
            return;
        }
        // No helper reads it here: the run before waited until none was inside.
        next_ = 0;
        {
            std::lock_guard<std::mutex> guard(lock_);
            grow(helpers);
            work_ = &work;
            parts_ = parts;
            wanted_ = helpers;
        }
        for (long n = 0; n < helpers; n++) wake_.notify_one();
        claim(work, parts);
        // Helpers that are not awake by now are not needed: no part is left.
        std::unique_lock<std::mutex> guard(lock_);
        wanted_ = 0;
        guard.unlock();
        for (long n = 0; n < YIELDS && inside_ > 0; n++) std::this_thread::yield();
        guard.lock();
        done_.wait(guard, [this] { return inside_ == 0; });
    }

   private:
    static constexpr long YIELDS = 50;  // some 20 microseconds: equal parts end together, and sleeping costs as much

    void claim(const std::function<void(long)>& work, long parts) {
        for (long p = next_++; p < parts; p = next_++) work(p);
    }

    // As many threads as the system grants: the caller does the parts that nobody else claims.
    void grow(long helpers) {
        try {
            for (; size_ < helpers; size_++) std::thread([this] { help(); }).detach();
        } catch (const std::system_error&) {
        }
    }

    void help() {
        std::unique_lock<std::mutex> guard(lock_);
        for (;;) {
            wake_.wait(guard, [this] { return wanted_ > 0; });
            wanted_--;
            inside_++;
            // Read under the lock, as the caller may only start another loop once inside_ is 0.
            const std::function<void(long)>& work = *work_;
            long parts = parts_;
            guard.unlock();
            claim(work, parts);
            guard.lock();
            if (--inside_ == 0) done_.notify_one();
        }
    }

    std::mutex busy_, lock_;
    std::condition_variable wake_, done_;
    const std::function<void(long)>* work_ = nullptr;  // the caller's own: `run` waits until no helper is inside
    // `inside_` changes under the lock alone; it is atomic for the yields in `run`, which read it without the lock.
    std::atomic<long> next_{0}, inside_{0};
    long parts_ = 0, wanted_ = 0, size_ = 0;
};

static std::atomic<Pool*> the_pool{nullptr};

// The process's pool. It is never destroyed, as its threads sleep in it until the process ends. A forked child has none of
// the threads, so it forgets the pool and makes its own.
static Pool& pool() {
    static std::once_flag is_watched;
    std::call_once(is_watched, [] { pthread_atfork(nullptr, nullptr, [] { the_pool = nullptr; }); });
    Pool* here = the_pool;
    if (!here) {
        Pool* made = new Pool;
        if (the_pool.compare_exchange_strong(here, made))
            here = made;
        else
            delete made;
    }
    return *here;
}

// Calls work(first, last) for [0, part), [part, 2 part), ... up to `count`; they do not depend on the number of threads.
template <class Work>
static void in_parts(long threads, long count, long part, const Work& work) {
    long parts = (count + part - 1) / part, helpers = (threads < parts ? threads : parts) - 1;
    auto one = [&](long p) { work(p * part, (p + 1) * part < count ? (p + 1) * part : count); };
    if (helpers > 0)
        pool().run(helpers, parts, one);
    else
        for (long p = 0; p < parts; p++) one(p);
}
