// SPDX-License-Identifier: GPL-2.0-only
/*
 * The balloon's memory: blocks of the page allocator.
 *
 * A block of a pageblock or more stays one block, so that guest and host work
 * per block and not per page. Compaction does not need the pages of such a
 * block. Smaller blocks are split into pages that compaction can move, like
 * those of the stock driver.
 */
#include <linux/delay.h>
#include <linux/list_sort.h>
#include <linux/mmzone.h>
#include <linux/page_ref.h>
#include <linux/pagemap.h>
#include <linux/vmstat.h>

#include "ebb_balloon.h"
#include "symbols.h"

/* One attempt, and no word about it: smaller orders follow, or a later attempt. */
#define BLOCK_FLAGS	(__GFP_NORETRY | __GFP_NOWARN | __GFP_NOMEMALLOC)

static bool ebb_is_kept_whole(unsigned int order)
{
	return order && order >= pageblock_order;
}

/*
 * Tools that want to see each allocation. Generic KASAN does not: to it, a block that was taken
 * directly stays free memory, which nothing may access.
 */
static bool ebb_allocator_is_observed(void)
{
	return IS_ENABLED(CONFIG_KASAN_SW_TAGS) || IS_ENABLED(CONFIG_KASAN_HW_TAGS) ||
	       IS_ENABLED(CONFIG_KMSAN) || IS_ENABLED(CONFIG_PAGE_OWNER) ||
	       IS_ENABLED(CONFIG_MEM_ALLOC_PROFILING);
}

/*
 * Blocks are taken directly off the allocator's lists, as compaction does:
 * alloc_pages() would clear them first (init_on_alloc is on in many kernels).
 * Clearing memory that is about to be ballooned costs more than everything
 * else, also for the host, which has to provide the memory.
 *
 * Where the kernel relies on the content of its free pages, the host must know.
 */
void ebb_blocks_start(struct ebb_balloon *eb)
{
	bool content_matters = want_init_on_free() || page_poisoning_enabled_static();

	eb->direct = !ebb_allocator_is_observed() && !debug_pagealloc_enabled() &&
		     (!content_matters || ebb_offers(eb, VIRTIO_BALLOON_F_PAGE_POISON)) &&
		     !ebb_symbols_find();
}

/* First block of the zone's lists for general use. The zone's lock must be held. */
static struct page *ebb_first_free(struct zone *zone, unsigned int order)
{
	static const int types[] = { MIGRATE_MOVABLE, MIGRATE_UNMOVABLE, MIGRATE_RECLAIMABLE };
	struct page *page;
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(types); i++) {
		page = list_first_entry_or_null(&zone->free_area[order].free_list[types[i]],
						struct page, lru);
		if (page)
			return page;
	}
	return NULL;
}

static struct page *ebb_take_from_zone(struct zone *zone, unsigned int order)
{
	/* The limits of an allocation without reclaim, and of one that wakes kswapd. */
	unsigned long reserve = ebb_is_kept_whole(order) ? low_wmark_pages(zone) :
							   min_wmark_pages(zone);
	struct page *page = NULL;
	unsigned long flags, free;

	if (!populated_zone(zone) || !READ_ONCE(zone->free_area[order].nr_free))
		return NULL;
	spin_lock_irqsave(&zone->lock, flags);
	free = zone_page_state(zone, NR_FREE_PAGES);
	/* Free pages of CMA serve only movable allocations, and none is taken here. */
	if (IS_ENABLED(CONFIG_CMA))
		free -= min(free, zone_page_state(zone, NR_FREE_CMA_PAGES));
	if (free > reserve + zone->lowmem_reserve[ZONE_NORMAL] + (1UL << order))
		page = ebb_first_free(zone, order);
	if (page && !ebb_symbols.isolate_free_page(page, order))
		page = NULL;
	spin_unlock_irqrestore(&zone->lock, flags);
	/* The first page of an allocated block has one reference. */
	if (page)
		init_page_count(page);
	return page;
}

/* Starts with this CPU's node. Never uses memory that must stay movable. */
static struct page *ebb_take_directly(unsigned int order)
{
	int first = numa_mem_id();
	int node = first;

	do {
		struct pglist_data *data = NODE_DATA(node);
		struct page *page;
		int zone;

		for (zone = ZONE_NORMAL; zone >= 0; zone--) {
			page = ebb_take_from_zone(&data->node_zones[zone], order);
			if (page)
				return page;
		}
		node = next_online_node(node);
		if (node >= MAX_NUMNODES)
			node = first_online_node;
	} while (node != first);
	return NULL;
}

/**
 * ebb_whole_take() - allocate a block that stays whole
 * @eb: the device
 * @order: order of a pageblock or more
 *
 * Return: the block, or NULL if none is free without reclaim. Its content is
 * undefined.
 */
struct page *ebb_whole_take(struct ebb_balloon *eb, unsigned int order)
{
	if (eb->direct)
		return ebb_take_directly(order);
	return alloc_pages((GFP_HIGHUSER | BLOCK_FLAGS) & ~__GFP_RECLAIM, order);
}

/**
 * ebb_whole_give() - free a block
 * @eb: the device
 * @page: the block, from ebb_whole_take()
 * @order: its order
 */
void ebb_whole_give(struct ebb_balloon *eb, struct page *page, unsigned int order)
{
	struct zone *zone = page_zone(page);
	unsigned long flags;

	/* A walker of page structures may hold a temporary reference. */
	if (!eb->direct || !page_ref_freeze(page, 1)) {
		__free_pages(page, order);
		return;
	}
	spin_lock_irqsave(&zone->lock, flags);
	ebb_symbols.putback_isolated_page(page, order, ebb_migratetype(page));
	spin_unlock_irqrestore(&zone->lock, flags);
}

/* Reclaims only for single pages. */
static struct page *ebb_allocate(struct ebb_balloon *eb, unsigned int order)
{
	gfp_t flags = EBB_PAGE_FLAGS | BLOCK_FLAGS;
	struct page *page;

	if (ebb_is_kept_whole(order))
		return ebb_whole_take(eb, order);
	if (eb->direct) {
		page = ebb_take_directly(order);
		if (page || order)
			return page;
		/* Reclaim makes more free than this page. The rest is taken directly. */
		eb->order = ebb_largest_order();
	}
	if (order)
		flags &= ~__GFP_RECLAIM;
	return alloc_pages(flags, order);
}

/**
 * ebb_block_allocate() - allocate a block for the balloon
 * @eb: the device; its @order is the last one that succeeded
 * @units: largest size of the block
 * @order: order of the block
 *
 * Tries smaller orders on failure.
 *
 * Return: the first page, or NULL.
 */
struct page *ebb_block_allocate(struct ebb_balloon *eb, u64 units, unsigned int *order)
{
	u64 pages = units >> EBB_UNIT_SHIFT;
	unsigned int try;

	if (!pages)
		return NULL;
	try = min_t(unsigned int, eb->order, __fls(pages));
	for (;;) {
		struct page *page = ebb_allocate(eb, try);

		if (page) {
			*order = try;
			if (!eb->deflate_on_oom)
				adjust_managed_page_count(page, -(1L << try));
			atomic64_inc(&eb->order_blocks[try]);
			return page;
		}
		if (!try)
			return NULL;
		eb->order = --try;
	}
}

/**
 * ebb_block_free() - return a block to the guest
 * @eb: the device
 * @page: first page
 * @order: its order
 */
void ebb_block_free(struct ebb_balloon *eb, struct page *page, unsigned int order)
{
	if (!eb->deflate_on_oom)
		adjust_managed_page_count(page, 1L << order);
	set_page_private(page, 0);
	if (ebb_is_kept_whole(order))
		ebb_whole_give(eb, page, order);
	else
		__free_pages(page, order);
}

void ebb_blocks_free(struct ebb_balloon *eb, struct list_head *pages)
{
	struct page *page, *next;

	list_for_each_entry_safe(page, next, pages, lru) {
		list_del(&page->lru);
		ebb_block_free(eb, page, page_private(page));
	}
}

/*
 * Dumps and readers of /proc/kcore leave out pages that are marked, each by itself, and walkers of
 * free memory recognize a block by its first page. A page that is read would have to be provided by
 * the host again.
 */
static void ebb_mark_block(struct page *page)
{
	unsigned long i;

	for (i = 0; i < 1UL << page_private(page); i++)
		__SetPageOffline(page + i);
}

static void ebb_unmark_block(struct page *page)
{
	unsigned long i;

	for (i = 0; i < 1UL << page_private(page); i++)
		__ClearPageOffline(page + i);
}

static void ebb_split_block(struct page *page, struct list_head *pages)
{
	unsigned int order = page_private(page);
	unsigned long i;

	set_page_private(page, 0);
	if (order)
		split_page(page, order);
	for (i = 0; i < 1UL << order; i++)
		list_add_tail(&page[i].lru, pages);
}

static void ebb_enqueue(struct ebb_balloon *eb, struct list_head *pages)
{
	atomic_long_add(balloon_page_list_enqueue(&eb->info, pages), &eb->listed);
}

static size_t ebb_dequeue(struct ebb_balloon *eb, struct list_head *pages, size_t count)
{
	size_t taken = balloon_page_list_dequeue(&eb->info, pages, count);

	atomic_long_sub(taken, &eb->listed);
	return taken;
}

/*
 * Pages that were dequeued cannot be enqueued again: balloon_page_list_enqueue() needs their locks,
 * and compaction, which has found them before, may hold one for a moment. They wait here for the
 * next message instead.
 */
static void ebb_add_spare(struct ebb_balloon *eb, struct list_head *pages)
{
	unsigned long flags;

	spin_lock_irqsave(&eb->lock, flags);
	list_splice_tail_init(pages, &eb->spare);
	spin_unlock_irqrestore(&eb->lock, flags);
}

static void ebb_take_spare(struct ebb_balloon *eb, struct list_head *pages)
{
	unsigned long flags;

	spin_lock_irqsave(&eb->lock, flags);
	list_splice_tail_init(&eb->spare, pages);
	spin_unlock_irqrestore(&eb->lock, flags);
}

/**
 * ebb_blocks_keep() - add blocks to the balloon
 * @eb: the device
 * @pages: blocks whose inflation the host has acknowledged
 * @again: they were taken from the balloon for a message that was not sent
 */
void ebb_blocks_keep(struct ebb_balloon *eb, struct list_head *pages, bool again)
{
	struct page *page, *next;
	unsigned long flags;
	LIST_HEAD(single);
	LIST_HEAD(whole);

	list_for_each_entry_safe(page, next, pages, lru) {
		list_del(&page->lru);
		if (ebb_is_kept_whole(page_private(page))) {
			ebb_mark_block(page);
			list_add(&page->lru, &whole);
		} else {
			ebb_split_block(page, &single);
		}
	}
	if (again)
		ebb_add_spare(eb, &single);
	else
		ebb_enqueue(eb, &single);
	spin_lock_irqsave(&eb->lock, flags);
	list_splice(&whole, &eb->blocks);
	spin_unlock_irqrestore(&eb->lock, flags);
}

/* Comparison function for list_sort() of pages. */
int ebb_by_address(void *unused, const struct list_head *left, const struct list_head *right)
{
	unsigned long a = page_to_pfn(list_entry(left, struct page, lru));
	unsigned long b = page_to_pfn(list_entry(right, struct page, lru));

	return a < b ? -1 : a > b;
}

static u64 ebb_first_unit(struct page *page)
{
	return (u64)page_to_pfn(page) << EBB_UNIT_SHIFT;
}

/* Moves single pages of the balloon into a message. Returns whether it has room for more. */
static bool ebb_take_pages(struct ebb_balloon *eb, struct ebb_message *message,
			   const struct ebb_format *format, u64 units)
{
	u64 room = min_t(u64, units, ebb_set_room(&message->set, format));
	struct page *page, *next;
	bool fits = true;
	LIST_HEAD(pages);

	/* More candidates make fewer bitmaps, since each has one window. */
	room = min_t(u64, room >> EBB_UNIT_SHIFT,
		     format->encodings == BIT(VIRTIO_BALLOON_ENC_BITMAP) ?
		     4 * EBB_SET_RANGES : EBB_SET_RANGES);
	if (!room)
		return false;
	ebb_take_spare(eb, &pages);
	if (list_empty(&pages))
		ebb_dequeue(eb, &pages, room);
	list_sort(NULL, &pages, ebb_by_address);
	list_for_each_entry_safe(page, next, &pages, lru) {
		/* There may be more spare pages than are wanted. */
		if (!room--)
			break;
		if (!ebb_set_add(&message->set, format, ebb_first_unit(page),
				 1 << EBB_UNIT_SHIFT)) {
			fits = false;
			break;
		}
		list_move_tail(&page->lru, &message->pages);
	}
	ebb_add_spare(eb, &pages);
	return fits;
}

/**
 * ebb_blocks_take() - remove the most recent blocks from the balloon
 * @eb: the device
 * @message: an empty message that will name them
 * @units: largest number; the out-of-memory message may take a whole block
 *
 * The balloon contains only blocks that the host has acknowledged. Does not
 * allocate.
 */
void ebb_blocks_take(struct ebb_balloon *eb, struct ebb_message *message, u64 units)
{
	struct ebb_format format = ebb_message_format(eb, message);
	struct ebb_set *set = &message->set;

	while (set->units < units) {
		u64 left = units - set->units;
		struct page *page;
		unsigned long flags;
		u64 size;

		if (!ebb_take_pages(eb, message, &format, left))
			break;
		left = units - set->units;
		if (!left || (set->units && message->use == EBB_USE_OOM))
			break;

		spin_lock_irqsave(&eb->lock, flags);
		page = list_first_entry_or_null(&eb->blocks, struct page, lru);
		if (page)
			list_del(&page->lru);
		spin_unlock_irqrestore(&eb->lock, flags);
		if (!page)
			break;
		ebb_unmark_block(page);

		size = 1ULL << page_private(page) << EBB_UNIT_SHIFT;
		if ((size <= left || message->use == EBB_USE_OOM) &&
		    size <= ebb_set_room(set, &format) &&
		    ebb_set_add(set, &format, ebb_first_unit(page), size)) {
			list_add_tail(&page->lru, &message->pages);
		} else if (size > left || !set->units) {
			/* Only a part is needed, or fits into a message. */
			LIST_HEAD(pages);

			ebb_split_block(page, &pages);
			ebb_enqueue(eb, &pages);
			ebb_count(eb, EBB_SPLIT_BLOCKS, 1);
		} else {
			ebb_mark_block(page);
			spin_lock_irqsave(&eb->lock, flags);
			list_add(&page->lru, &eb->blocks);
			spin_unlock_irqrestore(&eb->lock, flags);
			break;
		}
	}

	spin_lock_irq(&eb->lock);
	eb->units -= set->units;
	spin_unlock_irq(&eb->lock);
}

/**
 * ebb_blocks_free_all() - free the whole balloon without notifying the host
 * @eb: a device that was reset, with no message in flight
 */
void ebb_blocks_free_all(struct ebb_balloon *eb)
{
	struct page *page;
	LIST_HEAD(pages);

	spin_lock_irq(&eb->lock);
	list_splice_init(&eb->blocks, &pages);
	eb->units = 0;
	spin_unlock_irq(&eb->lock);
	list_for_each_entry(page, &pages, lru)
		ebb_unmark_block(page);
	ebb_take_spare(eb, &pages);
	ebb_blocks_free(eb, &pages);

	/* Compaction returns those that it has isolated. */
	while (atomic_long_read(&eb->listed)) {
		if (!ebb_dequeue(eb, &pages, EBB_SET_RANGES))
			usleep_range(1000, 2000);
		ebb_blocks_free(eb, &pages);
		cond_resched();
	}
}
