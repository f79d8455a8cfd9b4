/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Bitmaps of large blocks, one for each zone.
 */
#ifndef EBB_TRACKERS_ZONE_MAP_H
#define EBB_TRACKERS_ZONE_MAP_H

#include <linux/atomic.h>
#include <linux/mmzone.h>
#include <linux/mutex.h>

#include "compat.h"
#include "tracker.h"

/* A bit stands for a block one order below the largest: MAX_ORDER - 2 of old kernels. */
#define EBB_BLOCK_ORDER		(EBB_LARGEST_ORDER - 1)
#define EBB_BLOCK_PAGES		(1UL << EBB_BLOCK_ORDER)

/**
 * struct ebb_zone_map - the bitmap of a zone
 * @zone: the zone
 * @first: number of the block that bit 0 stands for; block n begins at page
 *	frame n << EBB_BLOCK_ORDER
 * @blocks: number of bits
 * @set: number of set bits
 * @coming: bits of blocks that were marked before they were free
 * @bits: the bitmap; bits are set any time and cleared under the zone's lock
 */
struct ebb_zone_map {
	struct zone *zone;
	unsigned long first;
	unsigned long blocks;
	atomic_t set;
	unsigned long *coming;
	unsigned long bits[];
};

/**
 * enum ebb_moment - when a block is marked
 * @EBB_COMING: it is going to be free
 * @EBB_MERGED: it is free
 */
enum ebb_moment {
	EBB_COMING,
	EBB_MERGED,
};

/* What ebb_zone_maps_mark() returns when nothing was marked. */
#define EBB_MARKED_BEFORE	0
#define EBB_OUTSIDE		(-1)

/* Number of a zone, below nr_node_ids * MAX_NR_ZONES. */
static inline unsigned int ebb_zone_number(struct zone *zone)
{
	return zone_to_nid(zone) * MAX_NR_ZONES + zone_idx(zone);
}

/* Maps are not replaced while this is held. Taken before ebb_memory_mutex. */
extern struct mutex ebb_zone_maps_mutex;

/* One bitmap for each zone of some size. Return: 0 or -ENOMEM. */
int ebb_zone_maps_alloc(void);

/* When nothing marks any more. */
void ebb_zone_maps_free(void);

/**
 * ebb_zone_maps_mark() - set the bit of the block that a page is in
 * @page: a page
 * @pfn: its number
 * @moment: when
 *
 * Preemption is off; any lock may be held. Return: how many bits of the zone
 * are set now, or one of the above.
 */
int ebb_zone_maps_mark(struct page *page, unsigned long pfn, enum ebb_moment moment);

/**
 * ebb_zone_maps_seed() - mark what is free already
 *
 * Return: how many bits it has set.
 */
unsigned long ebb_zone_maps_seed(void);

/* The maps of a walk, by number. NULL: that zone has none. */
unsigned int ebb_zone_maps_count(void);
struct ebb_zone_map *ebb_zone_maps_get(unsigned int number);

/* Takes back a bit. Return: whether it was set. The zone's lock is held. */
bool ebb_zone_map_clear(struct ebb_zone_map *map, unsigned long bit);

/* Sets the bits of blocks again that the host was not told of. */
void ebb_zone_map_restore(struct ebb_zone_map *map, const struct ebb_block *blocks,
			  unsigned int count);

/*
 * After memory came online: zones that have outgrown their maps get larger ones,
 * and all are looked through for free blocks. Under ebb_zone_maps_mutex.
 */
void ebb_zone_maps_grow(void);

/*
 * Memory has gone offline, under ebb_memory_mutex. Its bits are cleared: its
 * struct pages may go, and none of its pages can be freed, which would set them
 * again.
 */
void ebb_zone_maps_offline(unsigned long pfn, unsigned long pages);

#endif
