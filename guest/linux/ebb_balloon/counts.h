/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * What the trackers count. All counts but that of isolated blocks begin anew
 * when a tracker starts.
 */
#ifndef EBB_BALLOON_COUNTS_H
#define EBB_BALLOON_COUNTS_H

#include <linux/atomic.h>
#include <linux/percpu.h>
#include <linux/sched/clock.h>

/*
 * struct ebb_hot_counts - counted by hooks, which may nest in interrupts
 * @frees: calls of the hook
 * @captured: what the hook wrote down: entries of an array, bits of a bitmap
 * @lost: what it had no place for, and will not be told to the host for this free
 * @samples: how many calls were timed
 * @sample_ns: how long they took, the reading of the clock included
 */
struct ebb_hot_counts {
	u64 frees;
	u64 captured;
	u64 lost;
	u64 samples;
	u64 sample_ns;
};

DECLARE_PER_CPU(struct ebb_hot_counts, ebb_hot);

/*
 * struct ebb_counts - counted outside of hooks
 * @isolated_blocks: taken out of the allocator, ever
 * @isolated_pages: the same in pages
 * @isolated_now: blocks that are out of the allocator at the moment
 * @isolated_most: most of those at a time
 * @reported_blocks: named to the host, which answered well
 * @reported_pages: the same in pages
 * @false_isolations: what was written down and is not free any more
 * @low_memory: how often a pass left a zone alone because it is short of memory
 * @passes: passes over arrays, bitmaps or free lists
 * @report_errors: reports that failed; their blocks went back as they came
 */
struct ebb_counts {
	atomic64_t isolated_blocks;
	atomic64_t isolated_pages;
	atomic64_t isolated_now;
	atomic64_t isolated_most;
	atomic64_t reported_blocks;
	atomic64_t reported_pages;
	atomic64_t false_isolations;
	atomic64_t low_memory;
	atomic64_t passes;
	atomic64_t report_errors;
};

extern struct ebb_counts ebb_counts;

/* Blocks leave the allocator. In any context. */
static inline void ebb_count_isolated(unsigned int blocks, unsigned long pages)
{
	s64 now = atomic64_add_return(blocks, &ebb_counts.isolated_now);
	s64 most = atomic64_read(&ebb_counts.isolated_most);

	while (most < now && !atomic64_try_cmpxchg(&ebb_counts.isolated_most, &most, now))
		;
	atomic64_add(blocks, &ebb_counts.isolated_blocks);
	atomic64_add(pages, &ebb_counts.isolated_pages);
}

/* One call of a hook in this many is timed. */
#define EBB_SAMPLE_EVERY 1024

/* At a hook's beginning. Return: the time if this call is timed, else 0. */
static __always_inline u64 ebb_hook_enter(void)
{
	if (likely(this_cpu_inc_return(ebb_hot.frees) % EBB_SAMPLE_EVERY))
		return 0;
	return local_clock();
}

/* At a hook's end, with what ebb_hook_enter() returned. */
static __always_inline void ebb_hook_leave(u64 entered)
{
	if (likely(!entered))
		return;
	this_cpu_add(ebb_hot.sample_ns, local_clock() - entered);
	this_cpu_inc(ebb_hot.samples);
}

#endif
