// SPDX-License-Identifier: GPL-2.0-only
/*
 * Messages that name memory: sets of ranges, the choice of the shortest
 * encoding, and the two queues of the balloon's messages.
 */
#include <linux/bitops.h>
#include <linux/slab.h>

#include "ebb_balloon.h"

#define HEADER_BYTES	sizeof(struct virtio_balloon_msg_hdr)

/* Log2 of the units per bit in a bitmap that names exactly this set. */
static unsigned int ebb_bit_shift(const struct ebb_set *set)
{
	return min_t(unsigned int, __ffs64(set->alignment),
		     VIRTIO_BALLOON_MAX_PAGE_SHIFT - VIRTIO_BALLOON_PFN_SHIFT);
}

/* Size of the message in one encoding in bytes, 0 if it does not fit. */
static u32 ebb_message_bytes(const struct ebb_set *set, const struct ebb_format *format,
			     u8 encoding)
{
	u64 room = format->bytes;
	u64 payload;

	switch (encoding) {
	case VIRTIO_BALLOON_ENC_PFNS:
		if (set->end > VIRTIO_BALLOON_PFNS_END || set->units > VIRTIO_BALLOON_MAX_PFNS)
			return 0;
		payload = set->units * sizeof(__le32);
		break;
	case VIRTIO_BALLOON_ENC_BITMAP:
		payload = (set->end - set->first) >> ebb_bit_shift(set);
		if (payload > VIRTIO_BALLOON_MAX_BITMAP_BITS)
			return 0;
		payload = DIV_ROUND_UP_ULL(payload, BITS_PER_BYTE);
		break;
	default:
		payload = set->nr * sizeof(struct virtio_balloon_range);
		break;
	}
	if (!format->bare)
		payload += HEADER_BYTES;
	return payload <= room ? payload : 0;
}

/* The allowed encoding with the shortest message, 0 if none can name the set. */
static u8 ebb_shortest(const struct ebb_set *set, const struct ebb_format *format, u32 *bytes)
{
	/* Among equal lengths, the one that is cheapest to read. */
	static const u8 order[] = {
		VIRTIO_BALLOON_ENC_RANGES, VIRTIO_BALLOON_ENC_BITMAP, VIRTIO_BALLOON_ENC_PFNS
	};
	unsigned int i;
	u8 best = 0;

	*bytes = 0;
	for (i = 0; i < ARRAY_SIZE(order); i++) {
		u32 length;

		if (!(format->encodings & BIT(order[i])))
			continue;
		length = ebb_message_bytes(set, format, order[i]);
		if (length && (!best || length < *bytes)) {
			best = order[i];
			*bytes = length;
		}
	}
	return best;
}

void ebb_set_clear(struct ebb_set *set)
{
	set->nr = 0;
	set->units = 0;
	set->first = 0;
	set->end = 0;
	set->alignment = 0;
}

/**
 * ebb_set_add() - add memory to a set if one message can still name all of it
 * @set: the set
 * @format: format of the message
 * @start: first unit
 * @units: number of units; none of them may be in the set
 *
 * Return: whether it was added. If not, the set is unchanged and must be sent
 * first.
 */
bool ebb_set_add(struct ebb_set *set, const struct ebb_format *format, u64 start, u64 units)
{
	struct ebb_range *last = set->nr ? &set->ranges[set->nr - 1] : NULL;
	struct ebb_set with = *set;
	u32 bytes;

	with.first = set->nr ? min(set->first, start) : start;
	with.end = max(set->end, start + units);
	with.units += units;
	with.alignment |= start | (start + units);
	if (last && last->start + last->units == start) {
		if (!ebb_shortest(&with, format, &bytes))
			return false;
		last->units += units;
	} else if (last && start + units == last->start) {
		if (!ebb_shortest(&with, format, &bytes))
			return false;
		last->start = start;
		last->units += units;
	} else {
		if (set->nr == set->max)
			return false;
		with.nr++;
		if (!ebb_shortest(&with, format, &bytes))
			return false;
		set->ranges[set->nr].start = start;
		set->ranges[set->nr].units = units;
	}
	*set = with;
	return true;
}

/**
 * ebb_set_room() - upper limit of the units that can be added to a set
 * @set: the set
 * @format: format of the message
 *
 * Return: the room for page numbers if no other encoding is allowed, else the
 * limit of a message.
 */
u32 ebb_set_room(const struct ebb_set *set, const struct ebb_format *format)
{
	u32 most = EBB_MESSAGE_UNITS;

	if (format->encodings == BIT(VIRTIO_BALLOON_ENC_PFNS))
		most = (format->bytes - (format->bare ? 0 : HEADER_BYTES)) / sizeof(__le32);
	return most - min_t(u64, most, set->units);
}

static void ebb_write_pfns(const struct ebb_set *set, void *to)
{
	__le32 *pfns = to;
	unsigned int i;
	u64 unit;

	for (i = 0; i < set->nr; i++) {
		const struct ebb_range *range = &set->ranges[i];

		for (unit = range->start; unit < range->start + range->units; unit++)
			*pfns++ = cpu_to_le32(unit);
	}
}

static void ebb_write_bitmap(const struct ebb_set *set, u8 *to, u32 bytes)
{
	unsigned int shift = ebb_bit_shift(set);
	unsigned int i;

	memset(to, 0, bytes);
	for (i = 0; i < set->nr; i++) {
		u32 bit = (set->ranges[i].start - set->first) >> shift;
		u32 end = bit + (set->ranges[i].units >> shift);

		while (bit < end) {
			if (bit % BITS_PER_BYTE == 0 && end - bit >= BITS_PER_BYTE) {
				to[bit / BITS_PER_BYTE] = 0xff;
				bit += BITS_PER_BYTE;
			} else {
				to[bit / BITS_PER_BYTE] |= BIT(bit % BITS_PER_BYTE);
				bit++;
			}
		}
	}
}

static void ebb_write_ranges(const struct ebb_set *set, struct virtio_balloon_range *to)
{
	unsigned int i;

	for (i = 0; i < set->nr; i++) {
		to[i].start_pfn = cpu_to_le64(set->ranges[i].start);
		to[i].pages = cpu_to_le64(set->ranges[i].units);
	}
}

/**
 * ebb_set_write() - write a message
 * @set: memory to name; an empty set is an empty answer
 * @format: allowed formats
 * @like: template of the header with command, status and request id
 * @buffer: buffer for the message
 * @encoding: returns the encoding used
 *
 * Return: size of the message in bytes, 0 if it cannot be written.
 */
u32 ebb_set_write(const struct ebb_set *set, const struct ebb_format *format,
		  const struct virtio_balloon_msg_hdr *like, void *buffer, u8 *encoding)
{
	struct virtio_balloon_msg_hdr *header = buffer;
	u64 start = 0, count = 0;
	unsigned int shift = 0;
	u32 bytes = HEADER_BYTES;
	void *payload;

	*encoding = VIRTIO_BALLOON_ENC_PFNS;
	if (set->nr)
		*encoding = ebb_shortest(set, format, &bytes);
	payload = buffer + (format->bare ? 0 : HEADER_BYTES);
	switch (*encoding) {
	case VIRTIO_BALLOON_ENC_PFNS:
		count = set->units;
		ebb_write_pfns(set, payload);
		break;
	case VIRTIO_BALLOON_ENC_BITMAP:
		shift = ebb_bit_shift(set);
		start = set->first;
		count = (set->end - set->first) >> shift;
		ebb_write_bitmap(set, payload, bytes - HEADER_BYTES);
		break;
	case VIRTIO_BALLOON_ENC_RANGES:
		count = set->nr;
		ebb_write_ranges(set, payload);
		break;
	default:
		return 0;
	}
	if (format->bare)
		return bytes;
	*header = *like;
	header->page_shift = cpu_to_le16(VIRTIO_BALLOON_PFN_SHIFT + shift);
	header->encoding = cpu_to_le16(*encoding);
	header->start_pfn = cpu_to_le64(start);
	header->count = cpu_to_le64(count);
	return bytes;
}

/**
 * ebb_message_format() - current format of a message
 * @eb: the device
 * @message: the message
 *
 * Return: the format, which can change with the parameter "encoding".
 */
struct ebb_format ebb_message_format(struct ebb_balloon *eb, const struct ebb_message *message)
{
	struct ebb_format format = {
		.bare = !eb->negotiated,
		.encodings = ebb_encodings(eb),
		.bytes = PAGE_SIZE,
	};

	if (message->use == EBB_USE_MOVE)
		format.bytes = EBB_MOVE_BYTES;
	if (format.bare)
		format.bytes = min_t(u32, format.bytes, EBB_BARE_PFNS * sizeof(__le32));
	return format;
}

static struct list_head *ebb_idle_list(struct ebb_balloon *eb, const struct ebb_message *message)
{
	return message->use == EBB_USE_MOVE ? &eb->idle_move : &eb->idle_bulk;
}

/**
 * ebb_message_get() - take an idle message
 * @eb: the device
 * @use: purpose of the message
 *
 * Return: an empty message, or NULL if all messages of that use are in flight.
 */
struct ebb_message *ebb_message_get(struct ebb_balloon *eb, enum ebb_message_use use)
{
	struct list_head *idle = use == EBB_USE_MOVE ? &eb->idle_move : &eb->idle_bulk;
	struct ebb_message *message;
	unsigned long flags;

	spin_lock_irqsave(&eb->lock, flags);
	if (use == EBB_USE_OOM)
		message = eb->oom.state == EBB_IDLE ? &eb->oom : NULL;
	else
		message = list_first_entry_or_null(idle, struct ebb_message, node);
	if (message)
		list_del_init(&message->node);
	spin_unlock_irqrestore(&eb->lock, flags);
	if (message)
		ebb_set_clear(&message->set);
	return message;
}

/**
 * ebb_message_put() - return a message that is not in flight
 * @eb: the device
 * @message: a message whose pages were handled
 */
void ebb_message_put(struct ebb_balloon *eb, struct ebb_message *message)
{
	unsigned long flags;

	spin_lock_irqsave(&eb->lock, flags);
	message->state = EBB_IDLE;
	if (message->use != EBB_USE_OOM)
		list_add(&message->node, ebb_idle_list(eb, message));
	spin_unlock_irqrestore(&eb->lock, flags);
	/* The out-of-memory notifier waits until the pages of its message are free. */
	if (message->use == EBB_USE_OOM)
		wake_up_all(&eb->acked);
}

/**
 * ebb_message_send() - write a message and make it available
 * @eb: the device
 * @message: a message with pages in its set
 * @command: INFLATE or DEFLATE
 *
 * Neither sleeps nor allocates.
 *
 * Return: 0, -ESHUTDOWN if the device is being stopped, or the error of the
 * queue. On error the message still belongs to the caller.
 */
int ebb_message_send(struct ebb_balloon *eb, struct ebb_message *message, u16 command)
{
	struct ebb_format format = ebb_message_format(eb, message);
	bool inflate = command == VIRTIO_BALLOON_CMD_INFLATE;
	struct virtqueue *vq = eb->vqs[inflate ? EBB_VQ_INFLATE : EBB_VQ_DEFLATE];
	struct virtio_balloon_msg_hdr like = { .command = cpu_to_le16(command) };
	struct scatterlist sg;
	unsigned long flags;
	bool notify = false;
	u8 encoding;
	u32 bytes;
	int err;

	bytes = ebb_set_write(&message->set, &format, &like, message->buffer, &encoding);
	/* The parameter may have changed since the set was built. */
	if (!bytes) {
		format.encodings = eb->negotiated;
		bytes = ebb_set_write(&message->set, &format, &like, message->buffer, &encoding);
	}
	if (WARN_ON_ONCE(!bytes))
		return -EMSGSIZE;

	sg_init_one(&sg, message->buffer, bytes);
	spin_lock_irqsave(&eb->lock, flags);
	message->command = command;
	if (eb->stopping) {
		err = -ESHUTDOWN;
	} else {
		err = virtqueue_add_outbuf(vq, &sg, 1, message, GFP_ATOMIC);
		if (!err) {
			message->state = EBB_SENT;
			/* A move does not change the balloon's size. */
			if (message->use != EBB_USE_MOVE && inflate)
				eb->inflating += message->set.units;
			else if (message->use != EBB_USE_MOVE)
				eb->deflating += message->set.units;
			notify = virtqueue_kick_prepare(vq);
		}
	}
	spin_unlock_irqrestore(&eb->lock, flags);
	if (err)
		return err;
	if (notify)
		virtqueue_notify(vq);
	ebb_count(eb, EBB_MESSAGES, 1);
	ebb_count(eb, EBB_MESSAGE_BYTES, bytes);
	if (format.bare)
		ebb_count(eb, EBB_MESSAGES_BARE, 1);
	else
		ebb_count(eb, EBB_MESSAGES_PFNS + encoding - VIRTIO_BALLOON_ENC_PFNS, 1);
	return 0;
}

/**
 * ebb_messages_returned() - callback of inflateq and deflateq
 * @vq: the queue
 */
void ebb_messages_returned(struct virtqueue *vq)
{
	struct ebb_balloon *eb = vq->vdev->priv;
	struct ebb_message *message;
	unsigned long flags;
	unsigned int len;

	spin_lock_irqsave(&eb->lock, flags);
	while ((message = virtqueue_get_buf(vq, &len))) {
		message->state = EBB_DONE;
		list_add_tail(&message->node, &eb->done);
	}
	spin_unlock_irqrestore(&eb->lock, flags);
	wake_up_all(&eb->acked);
	if (virtqueue_is_broken(vq))
		ebb_device_failed(eb);
	ebb_size_kick(eb);
}

/**
 * ebb_messages_take_back() - complete all messages in flight
 * @eb: a device that was reset
 */
void ebb_messages_take_back(struct ebb_balloon *eb)
{
	struct virtqueue *vqs[] = { eb->vqs[EBB_VQ_INFLATE], eb->vqs[EBB_VQ_DEFLATE] };
	struct ebb_message *message;
	unsigned long flags;
	unsigned int i;

	spin_lock_irqsave(&eb->lock, flags);
	for (i = 0; i < ARRAY_SIZE(vqs); i++) {
		while (vqs[i] && (message = virtqueue_detach_unused_buf(vqs[i]))) {
			message->state = EBB_DONE;
			list_add_tail(&message->node, &eb->done);
		}
	}
	spin_unlock_irqrestore(&eb->lock, flags);
	wake_up_all(&eb->acked);
}

static int ebb_message_init(struct ebb_message *message, enum ebb_message_use use)
{
	message->use = use;
	INIT_LIST_HEAD(&message->node);
	INIT_LIST_HEAD(&message->pages);
	if (use == EBB_USE_MOVE) {
		message->set.ranges = &message->move.range;
		message->set.max = 1;
		message->buffer = message->move.bytes;
		return 0;
	}
	message->set.max = EBB_SET_RANGES;
	message->set.ranges = kvmalloc_array(EBB_SET_RANGES, sizeof(struct ebb_range), GFP_KERNEL);
	message->buffer = (void *)__get_free_page(GFP_KERNEL);
	return message->set.ranges && message->buffer ? 0 : -ENOMEM;
}

/**
 * ebb_messages_init() - allocate all messages
 * @eb: the device
 *
 * Return: 0 or -ENOMEM. ebb_messages_exit() must be called in both cases.
 */
int ebb_messages_init(struct ebb_balloon *eb)
{
	unsigned int i;
	int err = ebb_message_init(&eb->oom, EBB_USE_OOM);

	for (i = 0; i < EBB_BULK_MESSAGES && !err; i++)
		err = ebb_message_init(&eb->bulk[i], EBB_USE_BULK);
	if (err)
		return err;
	eb->moves = kcalloc(EBB_MOVE_MESSAGES, sizeof(*eb->moves), GFP_KERNEL);
	if (!eb->moves)
		return -ENOMEM;
	for (i = 0; i < EBB_MOVE_MESSAGES; i++)
		ebb_message_init(&eb->moves[i], EBB_USE_MOVE);
	return 0;
}

static void ebb_message_exit(struct ebb_message *message)
{
	kvfree(message->set.ranges);
	free_page((unsigned long)message->buffer);
}

void ebb_messages_exit(struct ebb_balloon *eb)
{
	unsigned int i;

	for (i = 0; i < EBB_BULK_MESSAGES; i++)
		ebb_message_exit(&eb->bulk[i]);
	ebb_message_exit(&eb->oom);
	kfree(eb->moves);
}

/**
 * ebb_messages_start() - add as many idle messages as fit into the queues
 * @eb: a device with queues
 *
 * Return: 0, or -ENOSPC if the queues are too short.
 */
int ebb_messages_start(struct ebb_balloon *eb)
{
	unsigned int room = min(virtqueue_get_vring_size(eb->vqs[EBB_VQ_INFLATE]),
				virtqueue_get_vring_size(eb->vqs[EBB_VQ_DEFLATE]));
	unsigned int i;

	INIT_LIST_HEAD(&eb->idle_bulk);
	INIT_LIST_HEAD(&eb->idle_move);
	INIT_LIST_HEAD(&eb->done);
	eb->oom.state = EBB_IDLE;
	if (!room)
		return -ENOSPC;
	/* One entry is reserved for the out-of-memory message. */
	if (room > 1)
		room--;
	for (i = 0; i < EBB_BULK_MESSAGES && room; i++, room--)
		list_add_tail(&eb->bulk[i].node, &eb->idle_bulk);
	/* One half of these uses one queue, the other half the other. */
	for (i = 0; i + 1 < EBB_MOVE_MESSAGES && room; i += 2, room--) {
		list_add_tail(&eb->moves[i].node, &eb->idle_move);
		list_add_tail(&eb->moves[i + 1].node, &eb->idle_move);
	}
	return 0;
}
