/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * What the trackers' hooks count. Begins anew when a tracker starts.
 */
#ifndef EBB_TRACKERS_HOT_H
#define EBB_TRACKERS_HOT_H

#include <linux/percpu.h>
#include <linux/sched/clock.h>
#include <linux/types.h>

struct seq_file;

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

/* One call of a hook in this many is timed. */
#define EBB_SAMPLE_EVERY 1024

/*
 * Counts a call of a hook. Return: whether it is one that is timed. An interrupt
 * between the two steps may time one call more or less, which costs nothing; one
 * step that also returns the number costs an exchange for each free.
 */
static __always_inline bool ebb_hook_count(void)
{
	this_cpu_inc(ebb_hot.frees);
	return unlikely(!(this_cpu_read(ebb_hot.frees) % EBB_SAMPLE_EVERY));
}

/* At the end of a call that is timed, with local_clock() of its beginning. */
static inline void ebb_hook_timed(u64 begun)
{
	this_cpu_add(ebb_hot.sample_ns, local_clock() - begun);
	this_cpu_inc(ebb_hot.samples);
}

void ebb_hot_reset(void);

/* Writes the sums over all CPUs, as lines of "name value". */
void ebb_hot_show(struct seq_file *m);

#endif
