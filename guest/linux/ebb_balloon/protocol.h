/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Wire format of Ebb's extension of virtio-balloon, see docs/extension.md.
 */
#ifndef EBB_BALLOON_PROTOCOL_H
#define EBB_BALLOON_PROTOCOL_H

#include <linux/bits.h>
#include <linux/build_bug.h>
#include <linux/types.h>

#define VIRTIO_BALLOON_F_PAGE_BITMAP		50
#define VIRTIO_BALLOON_F_PAGE_RANGES		51
#define VIRTIO_BALLOON_F_HOST_REQUEST_VQ	52
#define VIRTIO_BALLOON_F_REPORT_REQUEST		53

/* Commands: the first three are for messages, the last three for requests. */
#define VIRTIO_BALLOON_CMD_INFLATE		1
#define VIRTIO_BALLOON_CMD_DEFLATE		2
#define VIRTIO_BALLOON_CMD_FREE_PAGES		3
#define VIRTIO_BALLOON_CMD_CANCEL		4
#define VIRTIO_BALLOON_CMD_REPORT		5

/* Values, not bits. */
#define VIRTIO_BALLOON_STATUS_NONE		0
#define VIRTIO_BALLOON_STATUS_MORE		1
#define VIRTIO_BALLOON_STATUS_DONE		2
#define VIRTIO_BALLOON_STATUS_ABORTED		3

#define VIRTIO_BALLOON_ENC_PFNS			1
#define VIRTIO_BALLOON_ENC_BITMAP		2
#define VIRTIO_BALLOON_ENC_RANGES		3

#define VIRTIO_BALLOON_MAX_PFNS			65536
#define VIRTIO_BALLOON_MAX_BITMAP_BITS		8388608
#define VIRTIO_BALLOON_MAX_RANGES		65536
#define VIRTIO_BALLOON_MIN_PAGE_SHIFT		12
#define VIRTIO_BALLOON_MAX_PAGE_SHIFT		30

/* Page frame numbers of 4 KiB that fit into 32 bits. */
#define VIRTIO_BALLOON_PFNS_END			BIT_ULL(32)

/**
 * struct virtio_balloon_msg_hdr - header of every message
 * @command: operation on the pages
 * @page_shift: log2 of the bytes that a bit stands for; 12 without a bitmap
 * @status: whether more messages of an answer follow
 * @encoding: encoding of the payload
 * @request_id: id of the request that is answered, else 0
 * @start_pfn: first page of a bitmap, else 0
 * @count: number of page numbers, bits or ranges in the payload
 */
struct virtio_balloon_msg_hdr {
	__le16 command;
	__le16 page_shift;
	__le16 status;
	__le16 encoding;
	__le64 request_id;
	__le64 start_pfn;
	__le64 count;
};

struct virtio_balloon_range {
	__le64 start_pfn;
	__le64 pages;
};

struct virtio_balloon_host_request {
	__le16 command;
	__le16 page_shift;
	__le32 reserved;
	__le64 request_id;
};

static_assert(sizeof(struct virtio_balloon_msg_hdr) == 32);
static_assert(sizeof(struct virtio_balloon_range) == 16);
static_assert(sizeof(struct virtio_balloon_host_request) == 16);

#endif
