// SPDX-License-Identifier: GPL-2.0-only
/*
 * Taking free blocks out of the page allocator, reporting them, putting them back.
 *
 * What makes a report safe is that nobody can allocate a block while the host
 * may still take its memory away: it is off the free lists from before the
 * host is told until after the host has answered.
 */
#include <linux/export.h>
#include <linux/mm.h>
#include <linux/page-flags.h>
#include <linux/spinlock.h>
#include <linux/vmstat.h>

#include "counts.h"
#include "isolate.h"
#include "symbols.h"

bool ebb_find_free(unsigned long pfn, unsigned int least_order, struct ebb_block *found)
{
	unsigned long first = ALIGN_DOWN(pfn, 1UL << least_order);

	/*
	 * A block begins where its own size divides, and its first page knows its
	 * order. So its beginning is the page's number with some low bits cleared:
	 * half as many places to look at as there are orders.
	 */
	for (;;) {
		struct page *page = pfn_to_page(first);

		if (PageBuddy(page)) {
			unsigned long order = READ_ONCE(page->private);

			if (order >= least_order && order <= EBB_LARGEST_ORDER &&
			    pfn - first < 1UL << order) {
				found->pfn = first;
				found->order = order;
				return true;
			}
		}
		if (!first || __ffs(first) >= EBB_LARGEST_ORDER)
			return false;
		first &= first - 1;
	}
}
EXPORT_SYMBOL_GPL(ebb_find_free);

bool ebb_zone_has_room_for(struct zone *zone, unsigned long free_pages, unsigned int order)
{
	return free_pages > low_wmark_pages(zone) + ((unsigned long)EBB_REPORT_MAX << order);
}
EXPORT_SYMBOL_GPL(ebb_zone_has_room_for);

bool ebb_zone_has_room(struct zone *zone, unsigned int order)
{
	if (ebb_zone_has_room_for(zone, zone_page_state(zone, NR_FREE_PAGES), order))
		return true;
	atomic64_inc(&ebb_counts.low_memory);
	return false;
}
EXPORT_SYMBOL_GPL(ebb_zone_has_room);

enum ebb_hold ebb_batch_hold(struct ebb_batch *batch, const struct ebb_block *block)
{
	struct page *page = pfn_to_page(block->pfn);

	lockdep_assert_held(&batch->zone->lock);

	if (!PageBuddy(page) || page_private(page) != block->order ||
	    page_zone(page) != batch->zone)
		return EBB_NOT_FREE;
	if (PageReported(page))
		return EBB_REPORTED;
	if (ebb_migratetype(page) == MIGRATE_ISOLATE)
		return EBB_OFFLIMITS;
	if (!ebb_symbols.isolate_free_page(page, block->order))
		return EBB_LOW_MEMORY;

	batch->held[batch->held_count++] = *block;
	ebb_count_isolated(1, 1UL << block->order);
	return EBB_HELD;
}
EXPORT_SYMBOL_GPL(ebb_batch_hold);

void ebb_batch_name(struct ebb_batch *batch, unsigned long pfn, unsigned int order)
{
	batch->named[batch->named_count++] = (struct ebb_block){ .pfn = pfn, .order = order };
}
EXPORT_SYMBOL_GPL(ebb_batch_name);

static void ebb_batch_putback(struct ebb_batch *batch, bool reported)
{
	bool marks = reported && batch->marks && ebb_kernel_marks();
	unsigned int i;

	spin_lock_irq(&batch->zone->lock);
	for (i = 0; i < batch->held_count; i++) {
		struct page *page = pfn_to_page(batch->held[i].pfn);

		ebb_symbols.putback_isolated_page(page, batch->held[i].order,
						  ebb_migratetype(page));
		/* Not if it was merged with memory that the host still has to hear of. */
		if (marks && PageBuddy(page) && page_private(page) == batch->held[i].order)
			__SetPageReported(page);
	}
	spin_unlock_irq(&batch->zone->lock);
	atomic64_sub(batch->held_count, &ebb_counts.isolated_now);
}

int ebb_batch_report(struct ebb_balloon *eb, struct ebb_batch *batch)
{
	int err = 0;

	if (batch->named_count)
		err = ebb_report_blocks(eb, batch->named, batch->named_count);
	if (batch->held_count)
		ebb_batch_putback(batch, !err);

	if (err) {
		atomic64_inc(&ebb_counts.report_errors);
	} else {
		unsigned int i;

		for (i = 0; i < batch->named_count; i++)
			atomic64_add(1UL << batch->named[i].order, &ebb_counts.reported_pages);
		atomic64_add(batch->named_count, &ebb_counts.reported_blocks);
	}
	batch->held_count = 0;
	batch->named_count = 0;
	return err;
}
EXPORT_SYMBOL_GPL(ebb_batch_report);
