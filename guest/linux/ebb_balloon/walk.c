// SPDX-License-Identifier: GPL-2.0-only
/*
 * A walk over the free blocks of all zones, in steps of a few thousand page
 * structures under the zone's lock at most, and of some 50 us at most.
 */
#include <linux/memory.h>
#include <linux/mmzone.h>
#include <linux/nodemask.h>
#include <linux/page-flags.h>

#include "ebb_balloon.h"
#include "walk.h"

/* Page structures between looks at the clock. */
#define CLOCK_PAGES	32
/* After this time under a zone's lock a step ends. */
#define LOCK_NS		(50 * NSEC_PER_USEC)

static void ebb_note_longest(struct ebb_balloon *eb, enum ebb_counter counter, s64 ns)
{
	if (ns > atomic64_read(&eb->counters[counter]))
		atomic64_set(&eb->counters[counter], ns);
}

/*
 * Number of pages to skip at a page that is not free: those of a compound page
 * or of a block of the balloon. Both may change at any time, because no
 * reference is held. Free pages that are skipped for this reason are not found,
 * which a walk allows.
 */
static unsigned long ebb_used_pages(struct page *page)
{
	unsigned long order = 0;

	if (PageHead(page))
		order = compound_order(page);
	else if (PageOffline(page))
		order = page_private(page);
	return order <= EBB_LARGEST_ORDER ? 1UL << order : 1;
}

/* Looks for blocks in memory whose page structures must stay. Returns where it ended. */
static unsigned long ebb_walk_locked(struct ebb_walk *walk, struct zone *zone,
				     unsigned long pfn, unsigned long end)
{
	unsigned int looked = 0;
	unsigned long flags;
	ktime_t start;
	s64 held;

	spin_lock_irqsave(&zone->lock, flags);
	start = ktime_get();
	while (pfn < end && walk->found_nr < EBB_WALK_BLOCKS) {
		struct page *page = pfn_to_page(pfn);
		unsigned long pages;

		/* The lock of another zone's page is not held. */
		if (page_zone(page) != zone) {
			pages = 1;
		} else if (!PageBuddy(page)) {
			pages = ebb_used_pages(page);
		} else {
			unsigned long order = page_private(page);

			pages = order <= EBB_LARGEST_ORDER ? 1UL << order : 1;
			if (order >= walk->order && order <= EBB_LARGEST_ORDER) {
				walk->found[walk->found_nr++] = (struct ebb_block){
					.pfn = pfn,
					.order = order,
				};
			}
		}
		/* Blocks of interest begin at multiples of their size. */
		pfn = ALIGN(pfn + pages, 1UL << walk->order);
		if (++looked % CLOCK_PAGES == 0 &&
		    ktime_to_ns(ktime_sub(ktime_get(), start)) > LOCK_NS)
			break;
	}
	held = ktime_to_ns(ktime_sub(ktime_get(), start));
	spin_unlock_irqrestore(&zone->lock, flags);

	ebb_count(walk->eb, EBB_LOCKS, 1);
	ebb_note_longest(walk->eb, EBB_LONGEST_LOCK_NS, held);
	ebb_note_longest(walk->eb, EBB_LONGEST_LOCK_EVER_NS, held);
	return pfn;
}

static void ebb_walk_next_zone(struct ebb_walk *walk)
{
	walk->pfn = 0;
	if (++walk->zone == MAX_NR_ZONES) {
		walk->zone = 0;
		walk->node = next_online_node(walk->node);
	}
}

/* Sections are marked before this is called, so a step that begins now leaves them out. */
static int ebb_walk_memory_changes(struct notifier_block *notifier, unsigned long action,
				   void *unused)
{
	struct ebb_walk *walk = container_of(notifier, struct ebb_walk, notifier);

	if (action == MEM_OFFLINE) {
		mutex_lock(&walk->stepping);
		mutex_unlock(&walk->stepping);
	}
	return NOTIFY_OK;
}

/**
 * ebb_walk_init() - prepare for walks
 * @walk: zeroed
 * @eb: the device
 *
 * Return: 0, or an error; ebb_walk_exit() is allowed in both cases.
 */
int ebb_walk_init(struct ebb_walk *walk, struct ebb_balloon *eb)
{
	int err;

	walk->eb = eb;
	walk->node = MAX_NUMNODES;
	mutex_init(&walk->stepping);
	walk->notifier.notifier_call = ebb_walk_memory_changes;
	err = register_memory_notifier(&walk->notifier);
	walk->notified = !err;
	return err;
}

void ebb_walk_exit(struct ebb_walk *walk)
{
	if (walk->notified)
		unregister_memory_notifier(&walk->notifier);
}

/**
 * ebb_walk_begin() - begin at the first zone
 * @walk: the walk
 * @page_shift: log2 of the bytes of the smallest block of interest
 */
void ebb_walk_begin(struct ebb_walk *walk, unsigned int page_shift)
{
	walk->order = page_shift > PAGE_SHIFT ? page_shift - PAGE_SHIFT : 0;
	walk->order = min_t(unsigned int, walk->order, EBB_LARGEST_ORDER);
	walk->node = first_online_node;
	walk->zone = 0;
	walk->pfn = 0;
	walk->found_nr = 0;
}

/**
 * ebb_walk_step() - find blocks: at most to the end of a section of memory
 * @walk: a walk whose former blocks are no longer needed
 *
 * A block that was found was free while the zone's lock was held, and may be in
 * use again. Sleeps.
 *
 * Return: false at the end of the walk.
 */
bool ebb_walk_step(struct ebb_walk *walk)
{
	struct zone *zone;
	unsigned long end;

	walk->found_nr = 0;
	if (walk->node >= MAX_NUMNODES)
		return false;
	zone = &NODE_DATA(walk->node)->node_zones[walk->zone];
	if (!populated_zone(zone) || walk->pfn >= zone_end_pfn(zone)) {
		ebb_walk_next_zone(walk);
		return true;
	}
	walk->pfn = ALIGN(max(walk->pfn, zone->zone_start_pfn), 1UL << walk->order);
	end = min(ALIGN(walk->pfn + 1, PAGES_PER_SECTION), zone_end_pfn(zone));

	mutex_lock(&walk->stepping);
	if (pfn_to_online_page(walk->pfn))
		walk->pfn = ebb_walk_locked(walk, zone, walk->pfn, end);
	else
		walk->pfn = end;
	mutex_unlock(&walk->stepping);
	return true;
}
