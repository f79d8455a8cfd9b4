// SPDX-License-Identifier: GPL-2.0-only
/*
 * Tracker "bitmap": one bit for each large block, set when it becomes free.
 *
 * The design of the series "mm: Support for page hinting", v10 (2019). A block
 * is one order below the largest that the allocator has: 2 MiB on x86. Its bit
 * is set after the allocator has merged a freed page with its neighbours, when
 * the result is at least a block. Bits are cleared when blocks are reported,
 * not when they are allocated again. Once bitmap_threshold bits of a zone are
 * set, a work item walks the bitmaps bitmap_delay_ms later, takes out of the
 * allocator what is still free, at most 16 at a time, reports it and puts it
 * back.
 *
 * The hook is the tracepoint mm_page_pcpu_drain. It is behind the call of
 * __free_one_page() for each page that leaves a per-CPU list, under the zone's
 * lock: the moment "after merging" that v10 patched a call into, and most pages
 * come this way. (__free_one_page() itself is inline and therefore has no
 * ftrace entry; a kprobe there costs many times what a tracepoint does.) Blocks
 * of orders that do not use per-CPU lists are seen shortly before they are free,
 * by direct.c. They are marked as coming, too: a walk that does not find them
 * leaves their bits to the next one, which is long enough after.
 *
 * What is never captured: blocks that only become free by pages that bypass
 * the per-CPU lists, which happens when the list is locked by somebody or the
 * page block is being emptied; free memory in smaller blocks; and zones with
 * less free memory than their low watermark and a full batch.
 *
 * What was criticised in v10, and is different here:
 * - Bits behind the cursor of a walk waited for the next free. Here a walk
 *   that leaves bits behind queues the next one: after bitmap_delay_ms if they
 *   are as many as the threshold, else after bitmap_leftover_ms. So no bit
 *   waits forever, and an allocator that is never quiet cannot keep a walk
 *   going, either.
 * - Zones with holes: a bit for 2 MiB is 64 KiB of bitmap for 1 TiB of span,
 *   and a walk jumps from set bit to set bit.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/bitmap.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/seq_file.h>
#include <linux/tracepoint.h>
#include <linux/workqueue.h>

#include "bounded.h"
#include "counts.h"
#include "direct.h"
#include "hot.h"
#include "isolate.h"
#include "trackers.h"
#include "zone_map.h"

/* The order above PAGE_ALLOC_COSTLY_ORDER that per-CPU lists are used for as well. */
#ifdef CONFIG_TRANSPARENT_HUGEPAGE
#define EBB_LISTED_ORDER	pageblock_order
#else
#define EBB_LISTED_ORDER	0
#endif
/* Blocks out of the allocator at the same time. */
#define EBB_BITMAP_HELD		16
/* Set bits looked at under a zone's lock at a time. */
#define EBB_BITMAP_STEP		64
/* A held block of the largest order is two bits, and may be named as two blocks. */
static_assert(EBB_BITMAP_HELD * 2 <= EBB_REPORT_MAX);

static unsigned int bitmap_threshold = 16;
static unsigned int bitmap_delay_ms = 2000;
static unsigned int bitmap_leftover_ms = 10000;

ebb_bounded_param(bitmap_threshold, bitmap_threshold, 1, 4096, 0644);
MODULE_PARM_DESC(bitmap_threshold,
		 "tracker=bitmap: free blocks of a zone that start a walk (1 to 4096, default 16)");
ebb_bounded_param(bitmap_delay_ms, bitmap_delay_ms, 1, 3600 * 1000, 0644);
MODULE_PARM_DESC(bitmap_delay_ms,
		 "tracker=bitmap: time from the threshold to the walk (default 2000)");
ebb_bounded_param(bitmap_leftover_ms, bitmap_leftover_ms, 1, 3600 * 1000, 0644);
MODULE_PARM_DESC(bitmap_leftover_ms,
		 "tracker=bitmap: time to the walk for blocks below the threshold (default 10000)");

static struct ebb_balloon *ebb_bitmap_eb;
static struct tracepoint *ebb_drain_tracepoint;
/* No work may be queued: the tracker does not run, or is being stopped. */
static bool ebb_bitmap_stopping = true;
static unsigned long ebb_bitmap_seeded;

static void ebb_bitmap_walk(struct work_struct *work);
static void ebb_bitmap_grow(struct work_struct *work);
static DECLARE_WORK(ebb_grow_work, ebb_bitmap_grow);
static DECLARE_DELAYED_WORK(ebb_threshold_work, ebb_bitmap_walk);
static DECLARE_DELAYED_WORK(ebb_leftover_work, ebb_bitmap_walk);
/*
 * Queues a walk if a zone with @set bits needs one. Called under a zone's lock,
 * where nothing may be woken: with a delay of at least a jiffy this only arms a
 * timer (the kernel's own reporting does the same there).
 */
static void ebb_bitmap_queue(int set)
{
	unsigned long ms;

	if (set <= 0 || READ_ONCE(ebb_bitmap_stopping))
		return;
	if (set >= READ_ONCE(bitmap_threshold)) {
		ms = READ_ONCE(bitmap_delay_ms);
		queue_delayed_work(system_freezable_wq, &ebb_threshold_work,
				   max(msecs_to_jiffies(ms), 1UL));
	} else {
		ms = READ_ONCE(bitmap_leftover_ms);
		queue_delayed_work(system_freezable_wq, &ebb_leftover_work,
				   max(msecs_to_jiffies(ms), 1UL));
	}
}

static noinline void ebb_bitmap_capture(struct page *page, unsigned long pfn,
					enum ebb_moment moment)
{
	int set = ebb_zone_maps_mark(page, pfn, moment);

	if (set == EBB_MARKED_BEFORE)
		return;
	if (set == EBB_OUTSIDE) {
		this_cpu_inc(ebb_hot.lost);
		return;
	}
	this_cpu_inc(ebb_hot.captured);
	ebb_bitmap_queue(set);
}

/*
 * The first page of the aligned block that a page is in. On x86 page structures
 * are an array of powers of two that begins at a multiple of any block's, so
 * that a mask does.
 */
static __always_inline struct page *ebb_first_page(struct page *page, unsigned int order)
{
	unsigned long bytes = sizeof(*page) << order;

	if (IS_ENABLED(CONFIG_X86_64) && IS_ENABLED(CONFIG_SPARSEMEM_VMEMMAP) &&
	    !(bytes & (bytes - 1)))
		return (struct page *)((unsigned long)page & ~(bytes - 1));
	return pfn_to_page(ALIGN_DOWN(page_to_pfn(page), 1UL << order));
}

/*
 * Whether a page that has just been merged is in a free block that has a bit.
 * Called for each page, under the zone's lock, so that what a free block's first
 * page says is true. ebb_find_free() does the same for any order without it.
 */
static __always_inline bool ebb_bitmap_merged(struct page *page)
{
	struct page *first = ebb_first_page(page, EBB_BLOCK_ORDER);

	if (PageBuddy(first))
		return page_private(first) >= EBB_BLOCK_ORDER;
	first = ebb_first_page(page, EBB_LARGEST_ORDER);
	return PageBuddy(first) && page_private(first) == EBB_LARGEST_ORDER;
}

static __always_inline void ebb_bitmap_look(struct page *page)
{
	if (unlikely(ebb_bitmap_merged(page)))
		ebb_bitmap_capture(page, page_to_pfn(page), EBB_MERGED);
}

static noinline void ebb_bitmap_look_timed(struct page *page)
{
	u64 begun = local_clock();

	ebb_bitmap_look(page);
	ebb_hook_timed(begun);
}

/* A page went from a per-CPU list to the free lists and was merged. The zone's lock is held. */
static void ebb_bitmap_drained(void *unused, struct page *page, unsigned int order,
			       int migratetype)
{
	if (ebb_hook_count())
		ebb_bitmap_look_timed(page);
	else
		ebb_bitmap_look(page);
}

/*
 * Pages are going to be free. Those that are kept in per-CPU lists first, which
 * is nearly all, are seen in ebb_bitmap_drained() when they leave them.
 */
static void ebb_bitmap_freed(struct page *page, unsigned int order)
{
	if (likely(order <= PAGE_ALLOC_COSTLY_ORDER || order == EBB_LISTED_ORDER))
		return;
	ebb_bitmap_capture(page, page_to_pfn(page), EBB_COMING);
	if (order > EBB_BLOCK_ORDER)
		ebb_bitmap_capture(page, page_to_pfn(page) + EBB_BLOCK_PAGES, EBB_COMING);
}

/*
 * Adds what is to be reported of a block that is held: those of its parts that
 * have become free since they were last reported.
 */
static void ebb_bitmap_name(struct ebb_zone_map *map, struct ebb_batch *batch,
			    const struct ebb_block *block)
{
	unsigned long bit = (block->pfn >> EBB_BLOCK_ORDER) - map->first;
	bool low = ebb_zone_map_clear(map, bit);
	bool high = block->order > EBB_BLOCK_ORDER && ebb_zone_map_clear(map, bit + 1);

	if (low && high)
		ebb_batch_name(batch, block->pfn, block->order);
	else if (low)
		ebb_batch_name(batch, block->pfn, EBB_BLOCK_ORDER);
	else if (high)
		ebb_batch_name(batch, block->pfn + EBB_BLOCK_PAGES, EBB_BLOCK_ORDER);
}

/*
 * Fills a batch from the bits at @bit and above. The zone's lock is held.
 * Return: the bit to go on with.
 */
static unsigned long ebb_bitmap_fill(struct ebb_zone_map *map, struct ebb_batch *batch,
				     unsigned long bit)
{
	unsigned int looked;

	for (looked = 0; looked < EBB_BITMAP_STEP; looked++) {
		struct ebb_block block;

		if (batch->held_count == EBB_BITMAP_HELD)
			break;
		bit = find_next_bit(map->bits, map->blocks, bit);
		if (bit >= map->blocks)
			break;
		if (!ebb_find_free((map->first + bit) << EBB_BLOCK_ORDER, EBB_BLOCK_ORDER,
				   &block)) {
			if (!test_and_clear_bit(bit, map->coming)) {
				atomic64_inc(&ebb_counts.false_isolations);
				ebb_zone_map_clear(map, bit);
			}
			bit++;
			continue;
		}
		switch (ebb_batch_hold(batch, &block)) {
		case EBB_HELD:
			ebb_bitmap_name(map, batch, &block);
			break;
		case EBB_NOT_FREE:
			atomic64_inc(&ebb_counts.false_isolations);
			fallthrough;
		case EBB_REPORTED:
			ebb_zone_map_clear(map, bit);
			break;
		case EBB_OFFLIMITS:
			/* Its bit stays, for a later walk. */
			break;
		case EBB_LOW_MEMORY:
			return map->blocks;
		}
		bit++;
	}
	return bit;
}

static int ebb_bitmap_walk_zone(struct ebb_zone_map *map)
{
	/* Protected by ebb_zone_maps_mutex; too large for a stack. */
	static struct ebb_batch batch;
	static struct ebb_block named[EBB_REPORT_MAX];
	struct zone *zone = map->zone;
	unsigned long bit = 0;

	while (bit < map->blocks && !READ_ONCE(ebb_bitmap_stopping)) {
		unsigned int count;
		int err;

		if (!atomic_read(&map->set) || !ebb_zone_has_room(zone, EBB_BLOCK_ORDER))
			return 0;

		if (!ebb_report_begin(ebb_bitmap_eb))
			return -EIO;
		batch.zone = zone;
		spin_lock_irq(&zone->lock);
		bit = ebb_bitmap_fill(map, &batch, bit);
		spin_unlock_irq(&zone->lock);

		count = batch.named_count;
		memcpy(named, batch.named, count * sizeof(*named));
		err = ebb_batch_report(ebb_bitmap_eb, &batch);
		ebb_report_end(ebb_bitmap_eb);
		if (err) {
			ebb_zone_map_restore(map, named, count);
			return err;
		}
		cond_resched();
	}
	return 0;
}

/* How many bits of the zone that has most of them are set. */
static int ebb_bitmap_most(void)
{
	unsigned int i;
	int most = 0;

	for (i = 0; i < ebb_zone_maps_count(); i++) {
		struct ebb_zone_map *map = ebb_zone_maps_get(i);

		if (map)
			most = max(most, atomic_read(&map->set));
	}
	return most;
}

/* Both work items do this, one at a time. */
static void ebb_bitmap_walk(struct work_struct *work)
{
	unsigned int i;

	atomic64_inc(&ebb_counts.passes);
	mutex_lock(&ebb_zone_maps_mutex);
	for (i = 0; i < ebb_zone_maps_count(); i++) {
		struct ebb_zone_map *map = ebb_zone_maps_get(i);

		if (map && atomic_read(&map->set) && ebb_bitmap_walk_zone(map))
			break;
	}
	ebb_bitmap_queue(ebb_bitmap_most());
	mutex_unlock(&ebb_zone_maps_mutex);
}

static void ebb_bitmap_grow(struct work_struct *work)
{
	mutex_lock(&ebb_zone_maps_mutex);
	ebb_zone_maps_grow();
	ebb_bitmap_queue(ebb_bitmap_most());
	mutex_unlock(&ebb_zone_maps_mutex);
}

/* Only the work items queue each other any more, and stop to do so, too. */
static void ebb_bitmap_cancel(void)
{
	cancel_work_sync(&ebb_grow_work);
	cancel_delayed_work_sync(&ebb_threshold_work);
	cancel_delayed_work_sync(&ebb_leftover_work);
	/* The second one may have been about to queue the first. */
	cancel_delayed_work_sync(&ebb_threshold_work);
}

/* No hook is in place any more. */
static void ebb_bitmap_end(void)
{
	/* With the mutex, no notifier is about to queue work. */
	mutex_lock(&ebb_memory_mutex);
	WRITE_ONCE(ebb_bitmap_stopping, true);
	mutex_unlock(&ebb_memory_mutex);
	ebb_bitmap_cancel();
	ebb_zone_maps_free();
}

static int ebb_bitmap_start(struct ebb_balloon *eb)
{
	int err;

	ebb_hot_reset();
	ebb_drain_tracepoint = ebb_tracepoint_find("mm_page_pcpu_drain");
	if (!ebb_drain_tracepoint)
		return -EOPNOTSUPP;

	ebb_bitmap_eb = eb;
	WRITE_ONCE(ebb_bitmap_stopping, false);
	ebb_bitmap_seeded = 0;
	err = ebb_zone_maps_alloc();
	if (err)
		goto free_maps;
	err = tracepoint_probe_register(ebb_drain_tracepoint, ebb_bitmap_drained, NULL);
	if (err)
		goto free_maps;
	err = ebb_direct_hook_add(ebb_bitmap_freed);
	if (err)
		goto unregister;
	mutex_lock(&ebb_memory_mutex);
	ebb_bitmap_seeded = ebb_zone_maps_seed();
	mutex_unlock(&ebb_memory_mutex);
	mutex_lock(&ebb_zone_maps_mutex);
	ebb_bitmap_queue(ebb_bitmap_most());
	mutex_unlock(&ebb_zone_maps_mutex);
	return 0;

unregister:
	tracepoint_probe_unregister(ebb_drain_tracepoint, ebb_bitmap_drained, NULL);
	tracepoint_synchronize_unregister();
free_maps:
	/* Memory that came online meanwhile has queued work. */
	ebb_bitmap_end();
	return err;
}

static void ebb_bitmap_stop(void)
{
	WRITE_ONCE(ebb_bitmap_stopping, true);
	ebb_direct_hook_remove();
	tracepoint_probe_unregister(ebb_drain_tracepoint, ebb_bitmap_drained, NULL);
	tracepoint_synchronize_unregister();
	ebb_bitmap_end();
}

static void ebb_bitmap_show(struct seq_file *m)
{
	unsigned long set = 0;
	unsigned int i;

	ebb_hot_show(m);
	/* Of a walk that waits for its host, this does not wait: maps change under either mutex. */
	mutex_lock(&ebb_memory_mutex);
	for (i = 0; i < ebb_zone_maps_count(); i++) {
		struct ebb_zone_map *map = ebb_zone_maps_get(i);

		if (map)
			set += atomic_read(&map->set);
	}
	mutex_unlock(&ebb_memory_mutex);
	seq_printf(m, "bitmap_set %lu\n", set);
	seq_printf(m, "bitmap_seeded %lu\n", ebb_bitmap_seeded);
	seq_printf(m, "bitmap_probe %d\n", ebb_direct_hook_is_probe());
	seq_printf(m, "bitmap_missed %lu\n", ebb_direct_hook_missed());
}

void ebb_bitmap_online(void)
{
	/* A walk that waits for its host has the maps, and memory does not wait for that. */
	if (!READ_ONCE(ebb_bitmap_stopping))
		queue_work(system_freezable_wq, &ebb_grow_work);
}

const struct ebb_tracker_ops ebb_tracker_bitmap = {
	.isolates = true,
	.start = ebb_bitmap_start,
	.stop = ebb_bitmap_stop,
	.show = ebb_bitmap_show,
};
