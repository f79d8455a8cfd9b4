// SPDX-License-Identifier: GPL-2.0-only
/*
 * Compaction of the balloon's single pages.
 *
 * A page is moved by one INFLATE message for the new page and one DEFLATE
 * message for the old one. This does not wait for the host: compaction runs on
 * behalf of tasks that need memory, and a host that does not answer must not
 * block them. Until the messages are returned, the new page is not in the
 * balloon yet, and the old one is not free yet.
 */
#include <linux/pagemap.h>
#include <linux/vmstat.h>

#include "ebb_balloon.h"

#ifdef EBB_PAGES_MOVE
/* How long a page waits for a free message, in ms. */
#define MESSAGE_WAIT_MS	20

static bool ebb_get_messages(struct ebb_balloon *eb, struct ebb_message **in,
			     struct ebb_message **out)
{
	*in = ebb_message_get(eb, EBB_USE_MOVE);
	*out = *in ? ebb_message_get(eb, EBB_USE_MOVE) : NULL;
	if (*out)
		return true;
	if (*in)
		ebb_message_put(eb, *in);
	return false;
}

/*
 * The old page leaves the kernel's list, and its reference is the message's. The new one is on no
 * list before the host has acknowledged it.
 */
#ifdef EBB_KERNEL_MOVES
#define EBB_MOVED	(-ENOENT)

static void ebb_leave_list(struct balloon_dev_info *info, struct page *page)
{
	/* The caller removes it as a page that was deflated, and drops its own reference. */
	get_page(page);
	dec_node_page_state(page, NR_BALLOON_PAGES);
}

static bool ebb_enter_list(struct balloon_dev_info *info, struct page *page)
{
	balloon_page_enqueue(info, page);
	return true;
}
#else
#define EBB_MOVED	0

static void ebb_leave_list(struct balloon_dev_info *info, struct page *page)
{
	unsigned long flags;

	spin_lock_irqsave(&info->pages_lock, flags);
	info->isolated_pages--;
	__count_vm_event(BALLOON_MIGRATE);
	balloon_page_finalize(page);
	spin_unlock_irqrestore(&info->pages_lock, flags);
}

static bool ebb_enter_list(struct balloon_dev_info *info, struct page *page)
{
	if (!trylock_page(page))
		return false;
	spin_lock_irq(&info->pages_lock);
	balloon_page_insert(info, page);
	spin_unlock_irq(&info->pages_lock);
	unlock_page(page);
	return true;
}
#endif

static int ebb_move_page(struct balloon_dev_info *info, struct page *newpage, struct page *page,
			 enum migrate_mode mode)
{
	struct ebb_balloon *eb = container_of(info, struct ebb_balloon, info);
	struct ebb_message *in, *out;
	struct ebb_format format;
	unsigned long flags;

	if (!ebb_get_messages(eb, &in, &out)) {
		if (mode == MIGRATE_ASYNC || READ_ONCE(eb->stopping))
			return -EAGAIN;
		wait_event_timeout(eb->acked, READ_ONCE(eb->stopping) ||
				   !list_empty_careful(&eb->idle_move),
				   msecs_to_jiffies(MESSAGE_WAIT_MS));
		if (!ebb_get_messages(eb, &in, &out))
			return -EAGAIN;
	}

	format = ebb_message_format(eb, in);
	if (!ebb_set_add(&in->set, &format, (u64)page_to_pfn(newpage) << EBB_UNIT_SHIFT,
			 1 << EBB_UNIT_SHIFT) ||
	    !ebb_set_add(&out->set, &format, (u64)page_to_pfn(page) << EBB_UNIT_SHIFT,
			 1 << EBB_UNIT_SHIFT))
		goto give_up;

	get_page(newpage);
	in->move.page = newpage;
	if (ebb_message_send(eb, in, VIRTIO_BALLOON_CMD_INFLATE)) {
		put_page(newpage);
		goto give_up;
	}

	if (!eb->deflate_on_oom && page_zone(page) != page_zone(newpage)) {
		adjust_managed_page_count(newpage, -1);
		adjust_managed_page_count(page, 1);
	}
	ebb_leave_list(info, page);
	atomic_long_dec(&eb->listed);

	out->move.page = page;
	if (ebb_message_send(eb, out, VIRTIO_BALLOON_CMD_DEFLATE)) {
		/* The device is being stopped: the page is freed after the reset. */
		spin_lock_irqsave(&eb->lock, flags);
		out->state = EBB_DONE;
		out->command = VIRTIO_BALLOON_CMD_DEFLATE;
		list_add_tail(&out->node, &eb->done);
		spin_unlock_irqrestore(&eb->lock, flags);
	}
	ebb_count(eb, EBB_MOVED_PAGES, 1);
	return EBB_MOVED;

give_up:
	ebb_message_put(eb, in);
	ebb_message_put(eb, out);
	return -EAGAIN;
}

/**
 * ebb_move_end() - complete the returned message of a move
 * @eb: the device
 * @message: the message
 *
 * Return: false if compaction still holds the page.
 */
bool ebb_move_end(struct ebb_balloon *eb, struct ebb_message *message)
{
	struct page *page = message->move.page;

	if (message->command == VIRTIO_BALLOON_CMD_DEFLATE) {
		put_page(page);
		return true;
	}
	if (!ebb_enter_list(&eb->info, page))
		return false;
	atomic_long_inc(&eb->listed);
	return true;
}

void ebb_move_init(struct ebb_balloon *eb)
{
	balloon_devinfo_init(&eb->info);
	eb->info.migratepage = ebb_move_page;
}
#else
bool ebb_move_end(struct ebb_balloon *eb, struct ebb_message *message)
{
	return true;
}

void ebb_move_init(struct ebb_balloon *eb)
{
	balloon_devinfo_init(&eb->info);
}
#endif
