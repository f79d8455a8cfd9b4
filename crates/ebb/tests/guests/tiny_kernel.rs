//! Kernels of a few instructions, for guests that do one thing as fast as they can.

/// Where the code is loaded and entered.
const ADDRESS: u64 = 2 << 20;
/// Offsets in the file.
const PROGRAM_HEADERS: u64 = 64;
const NOTE: u64 = PROGRAM_HEADERS + 2 * 56;
const CODE: u64 = NOTE + NOTE_BYTES;
/// A note's header, the name "Xen" and an address of 8 bytes.
const NOTE_BYTES: u64 = 24;

/// Writes `x` and a newline to the serial line and requests a reboot from the keyboard controller.
pub const REBOOT: &[u8] = &[
    0xba, 0xf8, 0x03, 0x00, 0x00, // mov edx, 0x3f8
    0xb0, b'x', 0xee, // mov al, 'x'; out dx, al
    0xb0, b'\n', 0xee, // mov al, '\n'; out dx, al
    0xb0, 0xfe, 0xe6, 0x64, // mov al, 0xfe; out 0x64, al
    0xf4, 0xeb, 0xfd, // hlt, forever
];

/// Writes to the serial line without a pause.
pub const FLOOD: &[u8] = &[
    0xba, 0xf8, 0x03, 0x00, 0x00, // mov edx, 0x3f8
    0xb0, b'x', // mov al, 'x'
    0xee, 0xeb, 0xfd, // out dx, al, forever
];

/// An ELF file that is entered at the first byte of `code`, in 32-bit protected mode without paging
/// (PVH: Xen docs/misc/pvh.pandoc; note `XEN_ELFNOTE_PHYS32_ENTRY`).
pub fn elf(code: &[u8]) -> Vec<u8> {
    let mut file = b"\x7fELF\x02\x01\x01".to_vec();
    file.resize(16, 0);
    // Executable, x86-64, version 1.
    file.extend([2, 0, 62, 0, 1, 0, 0, 0]);
    put(&mut file, &[ADDRESS, PROGRAM_HEADERS, 0]);
    // Flags; sizes of this header and of two program headers; no sections.
    file.extend([0, 0, 0, 0, 64, 0, 56, 0, 2, 0, 64, 0, 0, 0, 0, 0]);
    let length = code.len() as u64;
    // PT_LOAD, readable and executable, and PT_NOTE.
    put(&mut file, &[5 << 32 | 1, CODE, ADDRESS, ADDRESS, length, length, 4]);
    put(&mut file, &[4 << 32 | 4, NOTE, 0, 0, NOTE_BYTES, NOTE_BYTES, 4]);
    // Sizes of name and address, type, name.
    put(&mut file, &[8 << 32 | 4, u64::from_le_bytes(*b"\x12\0\0\0Xen\0"), ADDRESS]);
    file.extend(code);
    file
}

fn put(file: &mut Vec<u8>, values: &[u64]) {
    for value in values {
        file.extend(value.to_le_bytes());
    }
}
