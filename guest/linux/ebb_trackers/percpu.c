// SPDX-License-Identifier: GPL-2.0-only
/*
 * Tracker "percpu": an array of freed pages for each CPU, and a thread for each.
 *
 * The design of the series "KVM: Guest Free Page Hinting", v8 (2019). Each free
 * is written into the CPU's array. When that is full it is scanned in place and
 * only pages stay that are in the allocator's free lists; when it is full of
 * those, the CPU's thread takes over: it looks again which pages are free, takes
 * their blocks out of the allocator, reports them and puts them back.
 *
 * The hook is the tracepoint mm_page_free, at the place in the allocator where
 * v8 had arch_free_page(). The page is not free yet at that moment: it goes to
 * a per-CPU list first, and is found in the free lists once that is drained.
 *
 * As v8 says of itself, a fixed array loses pages. What is never captured:
 * - frees between the moment that the array is full and the thread's turn
 *   (counted as lost). With a few large frees, that can be nearly all of a
 *   program that exits;
 * - pages that at the scan are still in a per-CPU list (percpu_dropped), if no
 *   later free in the same block is captured. Since Linux 6.7 those lists grow
 *   with the frees of a CPU, and this can be nearly all single pages;
 * - blocks smaller than percpu_order at the thread's turn (percpu_small);
 * - what was free before the tracker started.
 *
 * What differs from v8:
 * - A page in the same block of percpu_order as the last entry makes none of its
 *   own (percpu_merge=0 is v8's behaviour). Such a block is reported if all of it
 *   is free at the thread's turn, and is then found from any of its pages. A
 *   program that exits frees pages in the order of their addresses, mostly, so
 *   that nearly all frees end here, after some twenty instructions, and the array
 *   has room for far more. A scan judges a block by the first of its pages in
 *   turn, which is the first to leave its per-CPU list as well.
 * - A scan leaves one entry for each free block, not one for each page in it
 *   (percpu_merge=0 is v8's behaviour). A thousand pages are two huge pages,
 *   and v8 was full of them all the time.
 * - So it takes long until the array is full, and it is handed over after
 *   percpu_flush_ms in any case; what has room is written on until the thread's
 *   turn. 0 is v8's behaviour.
 * - An array is full when the scan frees less than 1/8 of it. A scan for every
 *   single free would be the end of a nearly full array otherwise.
 * - The thread gives the hook another array at once. v8's thread kept it until
 *   the host had answered to all of it, and all frees in that time were lost.
 * - The thread sorts what it has, so that one block is reported once and a
 *   zone's lock is taken for blocks of one zone (a rework that v8 had planned).
 * - Blocks below percpu_order are not reported: a host takes memory away in
 *   pages of its own, and huge ones would be torn apart. 0 is v8's behaviour.
 * - A batch of at most 32 blocks is out of the allocator at a time, not all.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/irq_work.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/percpu.h>
#include <linux/seq_file.h>
#include <linux/smpboot.h>
#include <linux/sort.h>
#include <linux/tracepoint.h>
#include <linux/workqueue.h>

#include "bounded.h"
#include "counts.h"
#include "hot.h"
#include "isolate.h"
#include "percpu_array.h"
#include "trackers.h"

/* Entries that the thread looks at under a zone's lock at a time. */
#define EBB_PERCPU_STEP 64

static unsigned int percpu_flush_ms = 2000;

ebb_bounded_param(percpu_flush_ms, percpu_flush_ms, 0, 3600 * 1000, 0444);
MODULE_PARM_DESC(percpu_flush_ms,
		 "tracker=percpu: hand over arrays that are not full this often (default 2000, 0: never)");

static struct ebb_balloon *ebb_percpu_eb;
static struct tracepoint *ebb_percpu_tracepoint;
static bool ebb_percpu_stopping;
static atomic64_t ebb_percpu_small;

static void ebb_percpu_flush(struct work_struct *work);
static DECLARE_DELAYED_WORK(ebb_flush_work, ebb_percpu_flush);

static int ebb_pfn_compare(const void *a, const void *b)
{
	unsigned long left = *(const unsigned long *)a;
	unsigned long right = *(const unsigned long *)b;

	return left < right ? -1 : left > right;
}

/* Replaces pages by the blocks that they are in, each once, in order. */
static void ebb_array_settle(struct ebb_array *array)
{
	unsigned int least = READ_ONCE(percpu_order);
	unsigned long *taken = array->taken;
	unsigned int i, kept = 0;
	struct ebb_block found;

	for (i = 0; i < array->taken_count; i++) {
		if (!ebb_find_free(taken[i], 0, &found))
			atomic64_inc(&ebb_counts.false_isolations);
		else if (found.order < least)
			atomic64_inc(&ebb_percpu_small);
		else
			taken[kept++] = found.pfn;
	}
	array->taken_count = kept;

	sort(taken, array->taken_count, sizeof(*taken), ebb_pfn_compare, NULL);
	for (i = 0, kept = 0; i < array->taken_count; i++) {
		if (!kept || taken[kept - 1] != taken[i])
			taken[kept++] = taken[i];
	}
	array->taken_count = kept;
}

/*
 * Moves blocks from the end of what was taken to the batch. Return: false if the
 * zone is short of memory and the rest is not worth going on with.
 */
static bool ebb_array_fill_batch(struct ebb_array *array)
{
	struct zone *zone = page_zone(pfn_to_page(array->taken[array->taken_count - 1]));
	unsigned int least = READ_ONCE(percpu_order);
	struct ebb_batch *batch = &array->batch;
	bool room = ebb_zone_has_room(zone, least);
	unsigned int looked;

	batch->zone = zone;
	spin_lock_irq(&zone->lock);
	for (looked = 0; room && looked < EBB_PERCPU_STEP; looked++) {
		struct ebb_block block;
		unsigned long pfn;

		if (!array->taken_count || batch->held_count == EBB_REPORT_MAX)
			break;
		pfn = array->taken[array->taken_count - 1];
		if (page_zone(pfn_to_page(pfn)) != zone)
			break;
		array->taken_count--;
		if (!ebb_find_free(pfn, least, &block)) {
			atomic64_inc(&ebb_counts.false_isolations);
			continue;
		}
		switch (ebb_batch_hold(batch, &block)) {
		case EBB_HELD:
			ebb_batch_name(batch, block.pfn, block.order);
			break;
		case EBB_NOT_FREE:
			atomic64_inc(&ebb_counts.false_isolations);
			break;
		case EBB_REPORTED:
		case EBB_OFFLIMITS:
			break;
		case EBB_LOW_MEMORY:
			this_cpu_inc(ebb_hot.lost);
			room = false;
			break;
		}
	}
	spin_unlock_irq(&zone->lock);
	return room;
}

static int ebb_percpu_should_run(unsigned int cpu)
{
	return READ_ONCE(per_cpu(ebb_arrays, cpu).due);
}

/* Reports what is in the array. */
static void ebb_percpu_run(unsigned int cpu)
{
	struct ebb_array *array = per_cpu_ptr(&ebb_arrays, cpu);
	bool go_on = true;

	atomic64_inc(&ebb_counts.passes);
	mutex_lock(&ebb_memory_mutex);
	ebb_array_take(array);
	ebb_array_settle(array);
	mutex_unlock(&ebb_memory_mutex);

	while (go_on && !READ_ONCE(ebb_percpu_stopping)) {
		unsigned int named;
		int err;

		if (!ebb_report_begin(ebb_percpu_eb))
			break;
		mutex_lock(&ebb_memory_mutex);
		go_on = array->taken_count && ebb_array_fill_batch(array);
		mutex_unlock(&ebb_memory_mutex);

		named = array->batch.named_count;
		err = ebb_batch_report(ebb_percpu_eb, &array->batch);
		ebb_report_end(ebb_percpu_eb);
		if (err) {
			this_cpu_add(ebb_hot.lost, named);
			break;
		}
		cond_resched();
	}

	mutex_lock(&ebb_memory_mutex);
	this_cpu_add(ebb_hot.lost, array->taken_count);
	array->taken_count = 0;
	mutex_unlock(&ebb_memory_mutex);
}

static void ebb_percpu_flush(struct work_struct *work)
{
	ebb_arrays_flush();
	queue_delayed_work(system_freezable_wq, &ebb_flush_work,
			   msecs_to_jiffies(percpu_flush_ms));
}

static struct smp_hotplug_thread ebb_percpu_threads = {
	.store = &ebb_percpu_thread,
	.thread_should_run = ebb_percpu_should_run,
	.thread_fn = ebb_percpu_run,
	.thread_comm = "ebb_percpu/%u",
};

static int ebb_percpu_start(struct ebb_balloon *eb)
{
	int err;

	ebb_hot_reset();
	ebb_percpu_tracepoint = ebb_tracepoint_find("mm_page_free");
	if (!ebb_percpu_tracepoint)
		return -EOPNOTSUPP;

	ebb_percpu_eb = eb;
	WRITE_ONCE(ebb_percpu_stopping, false);
	atomic64_set(&ebb_percpu_dropped, 0);
	atomic64_set(&ebb_percpu_small, 0);
	err = ebb_arrays_alloc();
	if (err)
		return err;
	err = smpboot_register_percpu_thread(&ebb_percpu_threads);
	if (err)
		goto free_arrays;
	err = tracepoint_probe_register(ebb_percpu_tracepoint, ebb_percpu_freed, NULL);
	if (err)
		goto unregister_threads;
	if (percpu_flush_ms)
		queue_delayed_work(system_freezable_wq, &ebb_flush_work,
				   msecs_to_jiffies(percpu_flush_ms));
	return 0;

unregister_threads:
	smpboot_unregister_percpu_thread(&ebb_percpu_threads);
free_arrays:
	ebb_arrays_free();
	return err;
}

static void ebb_percpu_stop(void)
{
	int cpu;

	WRITE_ONCE(ebb_percpu_stopping, true);
	tracepoint_probe_unregister(ebb_percpu_tracepoint, ebb_percpu_freed, NULL);
	tracepoint_synchronize_unregister();
	cancel_delayed_work_sync(&ebb_flush_work);
	/* Nobody hands an array over any more: the last wake-ups, then the threads. */
	for_each_possible_cpu(cpu)
		irq_work_sync(&per_cpu_ptr(&ebb_arrays, cpu)->wake);
	smpboot_unregister_percpu_thread(&ebb_percpu_threads);
	ebb_arrays_free();
}

static void ebb_percpu_show(struct seq_file *m)
{
	unsigned long waiting = 0;
	int cpu;

	ebb_hot_show(m);
	for_each_possible_cpu(cpu)
		waiting += READ_ONCE(per_cpu(ebb_arrays, cpu).used);
	seq_printf(m, "percpu_waiting %lu\n", waiting);
	seq_printf(m, "percpu_dropped %lld\n", (long long)atomic64_read(&ebb_percpu_dropped));
	seq_printf(m, "percpu_small %lld\n", (long long)atomic64_read(&ebb_percpu_small));
}

const struct ebb_tracker_ops ebb_tracker_percpu = {
	.isolates = true,
	.start = ebb_percpu_start,
	.stop = ebb_percpu_stop,
	.show = ebb_percpu_show,
};
