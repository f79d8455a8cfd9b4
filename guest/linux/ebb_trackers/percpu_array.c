// SPDX-License-Identifier: GPL-2.0-only
/*
 * The arrays of tracker "percpu": the hook, the scan, and memory that leaves.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/irq_work.h>
#include <linux/memory_hotplug.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/percpu.h>
#include <linux/sched.h>
#include <linux/slab.h>
#include <linux/smp.h>

#include "bounded.h"
#include "hot.h"
#include "isolate.h"
#include "percpu_array.h"
#include "record.h"
#include "trackers.h"

/* In no block that has pages. */
#define EBB_NO_PFN ULONG_MAX

static unsigned int percpu_entries = 1000;
unsigned int percpu_order = EBB_LARGEST_ORDER - 1;
static bool percpu_merge = true;

/* A scan looks at up to eleven page structures for each entry, with interrupts off. */
ebb_bounded_param(percpu_entries, percpu_entries, 64, 4096, 0444);
MODULE_PARM_DESC(percpu_entries,
		 "tracker=percpu: entries of each CPU's array (64 to 4096, default 1000)");
ebb_bounded_param(percpu_order, percpu_order, 0, EBB_LARGEST_ORDER, 0644);
MODULE_PARM_DESC(percpu_order, "tracker=percpu: smallest order of blocks to report");
module_param(percpu_merge, bool, 0644);
MODULE_PARM_DESC(percpu_merge,
		 "tracker=percpu: one entry for each block instead of each page (default Y)");

DEFINE_PER_CPU(struct ebb_array, ebb_arrays);
DEFINE_PER_CPU(struct task_struct *, ebb_percpu_thread);
atomic64_t ebb_percpu_dropped;

unsigned int ebb_percpu_entries(void)
{
	return percpu_entries;
}

/* Interrupts are off on the array's CPU. */
static void ebb_array_hand_over(struct ebb_array *array)
{
	array->due = true;
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
	if (kept > percpu_entries - percpu_entries / 8) {
		ebb_record(EBB_EVENT_FULL, NULL, kept, 0);
		array->full = true;
		ebb_array_hand_over(array);
	}
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
void ebb_percpu_freed(void *unused, struct page *page, unsigned int order)
{
	if (ebb_hook_count())
		ebb_percpu_look_timed(page, order);
	else
		ebb_percpu_look(page, order);
}

void ebb_array_take(struct ebb_array *array)
{
	lockdep_assert_held(&ebb_memory_mutex);

	local_irq_disable();
	ebb_record(EBB_EVENT_TURN, NULL, array->used, 0);
	swap(array->entries, array->taken);
	array->taken_count = array->used;
	array->used = 0;
	array->full = false;
	array->due = false;
	array->last = EBB_NO_PFN;
	local_irq_enable();
}

static bool ebb_array_has_entries(int cpu, void *unused)
{
	return READ_ONCE(per_cpu(ebb_arrays, cpu).used);
}

static void ebb_array_flush(void *unused)
{
	struct ebb_array *array = this_cpu_ptr(&ebb_arrays);

	if (array->used && !array->due) {
		ebb_record(EBB_EVENT_FLUSH, NULL, array->used, 0);
		ebb_array_hand_over(array);
	}
}

void ebb_arrays_flush(void)
{
	on_each_cpu_cond(ebb_array_has_entries, ebb_array_flush, NULL, true);
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

void ebb_arrays_free(void)
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
		array->due = false;
		array->last = EBB_NO_PFN;
	}
	mutex_unlock(&ebb_memory_mutex);
}

int ebb_arrays_alloc(void)
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
