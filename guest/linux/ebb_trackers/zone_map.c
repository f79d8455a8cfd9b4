// SPDX-License-Identifier: GPL-2.0-only
/*
 * Bitmaps of large blocks, one for each zone.
 *
 * Hooks find a zone's map in the section of their tracepoint, which is RCU's with
 * preemption off, or SRCU's in newer kernels; tracepoint_synchronize_unregister()
 * waits for both. A probe's handler has preemption off. Maps are replaced after
 * memory came online, under ebb_zone_maps_mutex and ebb_memory_mutex, so either of
 * them keeps them.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/bitmap.h>
#include <linux/memory_hotplug.h>
#include <linux/mm.h>
#include <linux/rcupdate.h>
#include <linux/slab.h>
#include <linux/spinlock.h>
#include <linux/tracepoint.h>

#include "isolate.h"
#include "record.h"
#include "trackers.h"
#include "zone_map.h"

/* Blocks looked at before others may run, without a lock. */
#define EBB_SEED_STEP 4096

/* See zone_map.h. */
DEFINE_MUTEX(ebb_zone_maps_mutex);

/* One of each zone of each node. */
static struct ebb_zone_map __rcu **ebb_maps;
static unsigned int ebb_map_count;

unsigned int ebb_zone_maps_count(void)
{
	return ebb_map_count;
}

struct ebb_zone_map *ebb_zone_maps_get(unsigned int number)
{
	return rcu_dereference_protected(ebb_maps[number],
					 lockdep_is_held(&ebb_zone_maps_mutex) ||
					 lockdep_is_held(&ebb_memory_mutex));
}

static void ebb_record_bit(enum ebb_event event, struct ebb_zone_map *map, unsigned long bit)
{
	ebb_record(event, map->zone, (map->first + bit) << EBB_BLOCK_ORDER, EBB_BLOCK_ORDER);
}

int ebb_zone_maps_mark(struct page *page, unsigned long pfn, enum ebb_moment moment)
{
	struct ebb_zone_map *map;
	unsigned long bit;

	/* Kept by the section of the tracepoint, where preemption may be on, or of the caller. */
	map = rcu_dereference_raw(ebb_maps[ebb_zone_number(page_zone(page))]);
	if (!map)
		return EBB_MARKED_BEFORE;
	bit = (pfn >> EBB_BLOCK_ORDER) - map->first;
	if (bit >= map->blocks)
		return EBB_OUTSIDE;
	if (moment == EBB_COMING)
		set_bit(bit, map->coming);
	if (test_bit(bit, map->bits))
		return EBB_MARKED_BEFORE;
	ebb_record_bit(EBB_EVENT_MARK, map, bit);
	if (test_and_set_bit(bit, map->bits))
		return EBB_MARKED_BEFORE;
	/* A walk may have counted the bit down already: at least the one of this call. */
	return max(atomic_inc_return(&map->set), 1);
}

bool ebb_zone_map_clear(struct ebb_zone_map *map, unsigned long bit)
{
	/* Bits are cleared only here, under the zone's lock: what is set now is so below. */
	if (bit >= map->blocks || !test_bit(bit, map->bits))
		return false;
	ebb_record_bit(EBB_EVENT_CLEAR, map, bit);
	clear_bit(bit, map->bits);
	atomic_dec(&map->set);
	return true;
}

void ebb_zone_map_restore(struct ebb_zone_map *map, const struct ebb_block *blocks,
			  unsigned int count)
{
	unsigned int i;

	for (i = 0; i < count; i++) {
		unsigned long bit = (blocks[i].pfn >> EBB_BLOCK_ORDER) - map->first;
		unsigned long end = bit + (1UL << (blocks[i].order - EBB_BLOCK_ORDER));

		for (; bit < end; bit++) {
			ebb_record_bit(EBB_EVENT_MARK, map, bit);
			if (!test_and_set_bit(bit, map->bits))
				atomic_inc(&map->set);
		}
	}
}

static struct ebb_zone_map *ebb_map_alloc(struct zone *zone)
{
	unsigned long first = zone->zone_start_pfn >> EBB_BLOCK_ORDER;
	unsigned long end = DIV_ROUND_UP(zone_end_pfn(zone), EBB_BLOCK_PAGES);
	unsigned long words = BITS_TO_LONGS(end - first);
	struct ebb_zone_map *map;

	/* Two bitmaps of the same size, one behind the other. */
	map = kvzalloc(struct_size(map, bits, 2 * words), GFP_KERNEL);
	if (!map)
		return NULL;
	map->zone = zone;
	map->first = first;
	map->blocks = end - first;
	map->coming = &map->bits[words];
	return map;
}

int ebb_zone_maps_alloc(void)
{
	int nid, i, err = 0;

	mutex_lock(&ebb_memory_mutex);
	ebb_maps = kvcalloc(nr_node_ids * MAX_NR_ZONES, sizeof(*ebb_maps), GFP_KERNEL);
	if (!ebb_maps) {
		err = -ENOMEM;
		goto out;
	}
	ebb_map_count = nr_node_ids * MAX_NR_ZONES;
	for_each_online_node(nid) {
		for (i = 0; i < MAX_NR_ZONES; i++) {
			struct zone *zone = &NODE_DATA(nid)->node_zones[i];
			struct ebb_zone_map *map;

			/* Zones like x86's DMA are too small to ever do without a batch. */
			if (!ebb_zone_has_room_for(zone, zone_managed_pages(zone), EBB_BLOCK_ORDER))
				continue;
			map = ebb_map_alloc(zone);
			if (!map) {
				err = -ENOMEM;
				goto out;
			}
			RCU_INIT_POINTER(ebb_maps[ebb_zone_number(zone)], map);
		}
	}
out:
	mutex_unlock(&ebb_memory_mutex);
	return err;
}

void ebb_zone_maps_free(void)
{
	unsigned int i;

	mutex_lock(&ebb_memory_mutex);
	for (i = 0; i < ebb_map_count; i++)
		kvfree(ebb_zone_maps_get(i));
	kvfree(ebb_maps);
	ebb_maps = NULL;
	ebb_map_count = 0;
	mutex_unlock(&ebb_memory_mutex);
}

/*
 * Looks at the first page of each block instead of walking free lists, which
 * could not be left in the middle. Memory may not go offline meanwhile.
 */
static unsigned long ebb_seed(unsigned long pfn, unsigned long end)
{
	unsigned long looked = 0, marked = 0;

	for (pfn = ALIGN_DOWN(pfn, EBB_BLOCK_PAGES); pfn < end; pfn += EBB_BLOCK_PAGES) {
		struct page *page = pfn_to_online_page(pfn);
		struct ebb_block found;

		if (page && ebb_find_free(pfn, EBB_BLOCK_ORDER, &found) &&
		    !PageReported(pfn_to_page(found.pfn))) {
			preempt_disable();
			if (ebb_zone_maps_mark(page, pfn, EBB_MERGED) > 0)
				marked++;
			preempt_enable();
		}
		if (++looked % EBB_SEED_STEP == 0)
			cond_resched();
	}
	return marked;
}

unsigned long ebb_zone_maps_seed(void)
{
	unsigned long marked = 0;
	unsigned int i;

	lockdep_assert_held(&ebb_memory_mutex);

	for (i = 0; i < ebb_map_count; i++) {
		struct ebb_zone_map *map = ebb_zone_maps_get(i);

		if (map)
			marked += ebb_seed(map->first << EBB_BLOCK_ORDER,
					   (map->first + map->blocks) << EBB_BLOCK_ORDER);
	}
	return marked;
}

static void ebb_map_grow(struct zone *zone)
{
	unsigned int index = ebb_zone_number(zone);
	struct ebb_zone_map *old = ebb_zone_maps_get(index), *new;
	unsigned long bit;

	if (!ebb_zone_has_room_for(zone, zone_managed_pages(zone), EBB_BLOCK_ORDER))
		return;
	if (old && zone->zone_start_pfn >> EBB_BLOCK_ORDER >= old->first &&
	    DIV_ROUND_UP(zone_end_pfn(zone), EBB_BLOCK_PAGES) <= old->first + old->blocks)
		return;
	new = ebb_map_alloc(zone);
	if (!new) {
		pr_warn("no memory for a larger bitmap: some blocks may be missed\n");
		return;
	}

	spin_lock_irq(&zone->lock);
	for (bit = 0; old && bit < old->blocks; bit++) {
		unsigned long moved = old->first + bit - new->first;

		if (moved >= new->blocks)
			continue;
		if (test_bit(bit, old->bits)) {
			__set_bit(moved, new->bits);
			atomic_inc(&new->set);
		}
		if (test_bit(bit, old->coming))
			__set_bit(moved, new->coming);
	}
	rcu_assign_pointer(ebb_maps[index], new);
	spin_unlock_irq(&zone->lock);
	/* The hooks are in sections of tracepoints, which need not be RCU's, or of RCU. */
	tracepoint_synchronize_unregister();
	synchronize_rcu();
	kvfree(old);
}

void ebb_zone_maps_grow(void)
{
	int nid, i;

	lockdep_assert_held(&ebb_zone_maps_mutex);

	mutex_lock(&ebb_memory_mutex);
	for_each_online_node(nid) {
		for (i = 0; ebb_maps && i < MAX_NR_ZONES; i++)
			ebb_map_grow(&NODE_DATA(nid)->node_zones[i]);
	}
	ebb_zone_maps_seed();
	mutex_unlock(&ebb_memory_mutex);
}

void ebb_zone_maps_offline(unsigned long pfn, unsigned long pages)
{
	unsigned int i;

	lockdep_assert_held(&ebb_memory_mutex);

	for (i = 0; i < ebb_map_count; i++) {
		struct ebb_zone_map *map = ebb_zone_maps_get(i);
		unsigned long block = pfn >> EBB_BLOCK_ORDER;
		unsigned long end = (pfn + pages) >> EBB_BLOCK_ORDER;

		if (!map)
			continue;
		spin_lock_irq(&map->zone->lock);
		for (block = max(block, map->first); block < end; block++)
			ebb_zone_map_clear(map, block - map->first);
		spin_unlock_irq(&map->zone->lock);
	}
}
