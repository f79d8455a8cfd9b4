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
 *   percpu_flush_ms in any case. 0 is v8's behaviour.
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
#include <linux/memory_hotplug.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/percpu.h>
#include <linux/seq_file.h>
#include <linux/slab.h>
#include <linux/smp.h>
#include <linux/smpboot.h>
#include <linux/sort.h>
#include <linux/tracepoint.h>
#include <linux/workqueue.h>

#include "bounded.h"
#include "counts.h"
#include "hot.h"
#include "isolate.h"
#include "record.h"
#include "trackers.h"

/* Entries that the thread looks at under a zone's lock at a time. */
#define EBB_PERCPU_STEP 64
/* In no block that has pages. */
#define EBB_NO_PFN ULONG_MAX

/**
 * struct ebb_array - freed pages of one CPU
 * @used: number of @entries
 * @full: the thread has to take @entries before there is room again
 * @last: the last entry, while it is sure to be in @entries and stands for its
 *	block; else EBB_NO_PFN
 * @entries: page frame numbers. These four are changed by their own CPU with
 *	interrupts off.
 * @taken_count: number of @taken
 * @taken: what the thread has taken. These two are under ebb_memory_mutex.
 * @wake: wakes the thread, which the hook cannot do under whatever lock it is
 * @batch: the second array of v8: blocks that are out of the allocator
 */
struct ebb_array {
	unsigned int used;
	bool full;
	unsigned long last;
	unsigned long *entries;
	unsigned int taken_count;
	unsigned long *taken;
	struct irq_work wake;
	struct ebb_batch batch;
};

static unsigned int percpu_entries = 1000;
static unsigned int percpu_order = EBB_LARGEST_ORDER - 1;
static unsigned int percpu_flush_ms = 2000;
static bool percpu_merge = true;

/* A scan looks at up to eleven page structures for each entry, with interrupts off. */
ebb_bounded_param(percpu_entries, percpu_entries, 64, 4096, 0444);
MODULE_PARM_DESC(percpu_entries,
		 "tracker=percpu: entries of each CPU's array (64 to 4096, default 1000)");
ebb_bounded_param(percpu_order, percpu_order, 0, EBB_LARGEST_ORDER, 0644);
MODULE_PARM_DESC(percpu_order, "tracker=percpu: smallest order of blocks to report");
ebb_bounded_param(percpu_flush_ms, percpu_flush_ms, 0, 3600 * 1000, 0444);
MODULE_PARM_DESC(percpu_flush_ms,
		 "tracker=percpu: hand over arrays that are not full this often (default 2000, 0: never)");
module_param(percpu_merge, bool, 0644);
MODULE_PARM_DESC(percpu_merge,
		 "tracker=percpu: one entry for each block instead of each page (default Y)");

static DEFINE_PER_CPU(struct ebb_array, ebb_arrays);
static DEFINE_PER_CPU(struct task_struct *, ebb_percpu_thread);

static struct ebb_balloon *ebb_percpu_eb;
static struct tracepoint *ebb_percpu_tracepoint;
static bool ebb_percpu_stopping;
static atomic64_t ebb_percpu_dropped;
static atomic64_t ebb_percpu_small;

static void ebb_percpu_flush(struct work_struct *work);
static DECLARE_DELAYED_WORK(ebb_flush_work, ebb_percpu_flush);

unsigned int ebb_percpu_entries(void)
{
	return percpu_entries;
}

/* Interrupts are off on the array's CPU. */
static void ebb_array_hand_over(struct ebb_array *array)
{
	ebb_record(EBB_EVENT_FULL, NULL, array->used, 0);
	array->full = true;
	irq_work_queue(&array->wake);
}

static void ebb_array_wake(struct irq_work *work)
{
	wake_up_process(__this_cpu_read(ebb_percpu_thread));
}

/* The array is full: keeps what is free by now. Interrupts are off. */
static void ebb_array_scan(struct ebb_array *array)
{
	bool merge = READ_ONCE(percpu_merge);
	unsigned int i, kept = 0, dropped = 0;
	struct ebb_block found;

	for (i = 0; i < array->used; i++) {
		if (!ebb_find_free(array->entries[i], 0, &found))
			dropped++;
		else if (!merge)
			array->entries[kept++] = array->entries[i];
		else if (!kept || array->entries[kept - 1] != found.pfn)
			array->entries[kept++] = found.pfn;
	}
	atomic64_add(dropped, &ebb_percpu_dropped);
	array->used = kept;
	/* The last entry may have been dropped. */
	array->last = EBB_NO_PFN;
	ebb_record(EBB_EVENT_SCAN, NULL, kept, 0);
	if (kept > percpu_entries - percpu_entries / 8)
		ebb_array_hand_over(array);
}

/* Whether a page is in the block that the last entry stands for. */
static __always_inline bool ebb_same_block(unsigned long pfn, unsigned long last)
{
	return !((pfn ^ last) >> READ_ONCE(percpu_order));
}

/* Writes pages into the array, unless their block is there. */
static noinline void ebb_percpu_write(struct page *page, unsigned int order)
{
	unsigned long pfn = page_to_pfn(page);
	struct ebb_array *array;
	unsigned long flags;

	local_irq_save(flags);
	array = this_cpu_ptr(&ebb_arrays);
	if (ebb_same_block(pfn, array->last)) {
		ebb_record(EBB_EVENT_AGAIN, page_zone(page), pfn, order);
	} else if (unlikely(array->full)) {
		ebb_record(EBB_EVENT_LOST, page_zone(page), pfn, order);
		this_cpu_inc(ebb_hot.lost);
	} else {
		ebb_record(EBB_EVENT_CAPTURE, page_zone(page), pfn, order);
		array->entries[array->used++] = pfn;
		array->last = READ_ONCE(percpu_merge) ? pfn : EBB_NO_PFN;
		this_cpu_inc(ebb_hot.captured);
		if (unlikely(array->used == percpu_entries))
			ebb_array_scan(array);
	}
	local_irq_restore(flags);
}

/*
 * One load decides without interrupts off: at that moment the entry is in the
 * array of a CPU. Should the task go on elsewhere, the thread may have its turn
 * before the page is free, as it may when an entry was written for the page.
 */
static __always_inline void ebb_percpu_look(struct page *page, unsigned int order)
{
	if (likely(ebb_same_block(page_to_pfn(page), this_cpu_read(ebb_arrays.last))) &&
	    !static_branch_unlikely(&ebb_recording))
		return;
	ebb_percpu_write(page, order);
}

static noinline void ebb_percpu_look_timed(struct page *page, unsigned int order)
{
	u64 begun = local_clock();

	ebb_percpu_look(page, order);
	ebb_hook_timed(begun);
}

/* Pages are going to be free. Interrupts may be on, and in newer kernels preemption, too. */
static void ebb_percpu_freed(void *unused, struct page *page, unsigned int order)
{
	if (ebb_hook_count())
		ebb_percpu_look_timed(page, order);
	else
		ebb_percpu_look(page, order);
}

/* The thread takes what the hook has written, and leaves it an empty array. */
static void ebb_array_take(struct ebb_array *array)
{
	lockdep_assert_held(&ebb_memory_mutex);

	local_irq_disable();
	ebb_record(EBB_EVENT_TURN, NULL, array->used, 0);
	swap(array->entries, array->taken);
	array->taken_count = array->used;
	array->used = 0;
	array->full = false;
	array->last = EBB_NO_PFN;
	local_irq_enable();
}

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
	return READ_ONCE(per_cpu(ebb_arrays, cpu).full);
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

static bool ebb_array_has_entries(int cpu, void *unused)
{
	return READ_ONCE(per_cpu(ebb_arrays, cpu).used);
}

static void ebb_array_flush(void *unused)
{
	struct ebb_array *array = this_cpu_ptr(&ebb_arrays);

	if (array->used && !array->full)
		ebb_array_hand_over(array);
}

static void ebb_percpu_flush(struct work_struct *work)
{
	on_each_cpu_cond(ebb_array_has_entries, ebb_array_flush, NULL, true);
	queue_delayed_work(system_freezable_wq, &ebb_flush_work,
			   msecs_to_jiffies(percpu_flush_ms));
}

struct ebb_pfn_range {
	unsigned long pfn;
	unsigned long pages;
};

static unsigned int ebb_pfns_forget(unsigned long *pfns, unsigned int count,
				    const struct ebb_pfn_range *range)
{
	unsigned int i, kept = 0;

	for (i = 0; i < count; i++) {
		if (pfns[i] - range->pfn >= range->pages)
			pfns[kept++] = pfns[i];
	}
	return kept;
}

static void ebb_array_forget(struct ebb_array *array, const struct ebb_pfn_range *range)
{
	array->used = ebb_pfns_forget(array->entries, array->used, range);
	array->last = EBB_NO_PFN;
}

static void ebb_array_forget_local(void *range)
{
	ebb_array_forget(this_cpu_ptr(&ebb_arrays), range);
}

/* Memory is offline and its struct pages may go: no array may name it any more. */
void ebb_percpu_offline(unsigned long pfn, unsigned long pages)
{
	struct ebb_pfn_range range = { .pfn = pfn, .pages = pages };
	int cpu;

	/* mem_hotplug_begin() keeps CPUs where they are. */
	on_each_cpu(ebb_array_forget_local, &range, 1);
	for_each_possible_cpu(cpu) {
		struct ebb_array *array = per_cpu_ptr(&ebb_arrays, cpu);

		if (!cpu_online(cpu))
			ebb_array_forget(array, &range);
		array->taken_count = ebb_pfns_forget(array->taken, array->taken_count, &range);
	}
}

static struct smp_hotplug_thread ebb_percpu_threads = {
	.store = &ebb_percpu_thread,
	.thread_should_run = ebb_percpu_should_run,
	.thread_fn = ebb_percpu_run,
	.thread_comm = "ebb_percpu/%u",
};

static void ebb_arrays_free(void)
{
	int cpu;

	mutex_lock(&ebb_memory_mutex);
	for_each_possible_cpu(cpu) {
		struct ebb_array *array = per_cpu_ptr(&ebb_arrays, cpu);

		kvfree(array->entries);
		kvfree(array->taken);
		array->entries = NULL;
		array->taken = NULL;
		array->used = 0;
		array->taken_count = 0;
		array->full = false;
		array->last = EBB_NO_PFN;
	}
	mutex_unlock(&ebb_memory_mutex);
}

static int ebb_arrays_alloc(void)
{
	int cpu;

	for_each_possible_cpu(cpu) {
		struct ebb_array *array = per_cpu_ptr(&ebb_arrays, cpu);

		array->entries = kvmalloc_array(percpu_entries, sizeof(*array->entries),
						GFP_KERNEL);
		array->taken = kvmalloc_array(percpu_entries, sizeof(*array->taken), GFP_KERNEL);
		if (!array->entries || !array->taken) {
			ebb_arrays_free();
			return -ENOMEM;
		}
		array->last = EBB_NO_PFN;
		init_irq_work(&array->wake, ebb_array_wake);
	}
	return 0;
}

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
