use std::io::Write as _;

use proptest::prelude::*;
use vm_memory::Bytes;

use super::*;

const RAM_BYTES: u64 = 64 << 20;
const ENTRY: u32 = 0x0100_0200;

fn memory() -> GuestMemory {
    GuestMemory::from_ranges(&[(GuestAddress(0), RAM_BYTES as usize)]).unwrap()
}

fn file(bytes: &[u8]) -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(bytes).unwrap();
    file
}

/// An ELF kernel of one page at 16 MiB, optionally with a PVH note.
fn elf(memory_bytes: u64, pvh: bool) -> Vec<u8> {
    const HEADER: usize = 64;
    const PROGRAM_HEADER: usize = 56;
    let note: Vec<u8> =
        [4u32, 4, 18].iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<_>>();
    let note = [note.as_slice(), b"Xen\0", &ENTRY.to_le_bytes()].concat();
    let note_offset = HEADER + 2 * PROGRAM_HEADER;
    let text_offset = 4096;
    let mut bytes = vec![0u8; text_offset + 4096];
    bytes[..4].copy_from_slice(b"\x7fELF");
    bytes[4..7].copy_from_slice(&[2, 1, 1]);
    bytes[16..18].copy_from_slice(&2u16.to_le_bytes());
    bytes[18..20].copy_from_slice(&62u16.to_le_bytes());
    bytes[24..32].copy_from_slice(&0x0100_0000u64.to_le_bytes());
    bytes[32..40].copy_from_slice(&(HEADER as u64).to_le_bytes());
    bytes[52..54].copy_from_slice(&64u16.to_le_bytes());
    bytes[54..56].copy_from_slice(&(PROGRAM_HEADER as u16).to_le_bytes());
    bytes[56..58].copy_from_slice(&(1 + u16::from(pvh)).to_le_bytes());
    let mut program_header =
        |index: usize, kind: u32, offset: usize, address: u64, in_file: u64, in_memory: u64| {
            let header = &mut bytes[HEADER + index * PROGRAM_HEADER..][..PROGRAM_HEADER];
            header[..4].copy_from_slice(&kind.to_le_bytes());
            header[8..16].copy_from_slice(&(offset as u64).to_le_bytes());
            header[24..32].copy_from_slice(&address.to_le_bytes());
            header[32..40].copy_from_slice(&in_file.to_le_bytes());
            header[40..48].copy_from_slice(&in_memory.to_le_bytes());
            header[48..56].copy_from_slice(&4u64.to_le_bytes());
        };
    program_header(0, 1, text_offset, 0x0100_0000, 4096, memory_bytes);
    if pvh {
        program_header(1, 4, note_offset, 0, note.len() as u64, note.len() as u64);
    }
    bytes[note_offset..note_offset + note.len()].copy_from_slice(&note);
    bytes[text_offset..text_offset + 4].copy_from_slice(b"TEXT");
    bytes
}

/// A bzImage of one setup sector and one page.
fn bzimage(init_bytes: u32) -> Vec<u8> {
    let mut bytes = vec![0u8; 1024 + 4096];
    bytes[0x1f1] = 1;
    bytes[0x1f4..0x1f8].copy_from_slice(&(4096u32 / 16).to_le_bytes());
    bytes[0x1fe..0x200].copy_from_slice(&[0x55, 0xaa]);
    bytes[0x202..0x206].copy_from_slice(b"HdrS");
    bytes[0x206..0x208].copy_from_slice(&0x020fu16.to_le_bytes());
    bytes[0x211] = 1;
    bytes[0x214..0x218].copy_from_slice(&0x10_0000u32.to_le_bytes());
    bytes[0x22c..0x230].copy_from_slice(&0x7fff_ffffu32.to_le_bytes());
    bytes[0x236] = 1;
    bytes[0x238..0x23c].copy_from_slice(&2047u32.to_le_bytes());
    bytes[0x258..0x260].copy_from_slice(&0x0100_0000u64.to_le_bytes());
    bytes[0x260..0x264].copy_from_slice(&init_bytes.to_le_bytes());
    bytes
}

fn load(
    kernel: &[u8],
    initrd: Option<&[u8]>,
    cmdline: &str,
    memory: &GuestMemory,
) -> Result<Entry, BootError> {
    let kernel = file(kernel);
    let initrd = initrd.map(file);
    let image = BootImage::open(
        kernel.path(),
        initrd.as_ref().map(tempfile::NamedTempFile::path),
        cmdline,
    )?;
    image.load(memory, RAM_BYTES, GuestAddress(layout::ACPI_START))
}

fn u32_at(memory: &GuestMemory, address: u64) -> u32 {
    memory.read_obj(GuestAddress(address)).unwrap()
}

fn u64_at(memory: &GuestMemory, address: u64) -> u64 {
    memory.read_obj(GuestAddress(address)).unwrap()
}

#[test]
fn elf_with_note_is_entered_through_pvh() {
    let memory = memory();
    let initrd = vec![7u8; 10_000];
    let entry = load(&elf(4096, true), Some(&initrd), "quiet", &memory).unwrap();
    assert_eq!(entry, Entry::Pvh(GuestAddress(u64::from(ENTRY))));
    assert_eq!(u32_at(&memory, 0x0100_0000), u32::from_le_bytes(*b"TEXT"));
    let info = layout::PVH_START_INFO;
    assert_eq!(u32_at(&memory, info), 0x336e_c578);
    assert_eq!(u32_at(&memory, info + 12), 1);
    assert_eq!(u64_at(&memory, info + 32), layout::ACPI_START);
    let module = u64_at(&memory, info + 16);
    let (start, size) = (u64_at(&memory, module), u64_at(&memory, module + 8));
    assert_eq!(size, initrd.len() as u64);
    let mut loaded = vec![0; initrd.len()];
    memory.read_slice(&mut loaded, GuestAddress(start)).unwrap();
    assert_eq!(loaded, initrd);
    assert_eq!(start % 4096, 0);
    let mut cmdline = [0; 6];
    memory.read_slice(&mut cmdline, GuestAddress(u64_at(&memory, info + 24))).unwrap();
    assert_eq!(&cmdline, b"quiet\0");
}

#[test]
fn a_truncated_bzimage_is_refused() {
    let whole = bzimage(1 << 20);
    for length in [0x260, 1024, whole.len() - 1] {
        let error = load(&whole[..length], None, "", &memory()).unwrap_err();
        assert!(matches!(error, BootError::NotAKernel { .. }), "{error}");
        assert!(
            error.to_string().contains(&format!("{length} of the {} bytes", whole.len())),
            "{error}"
        );
    }
}

#[test]
fn elf_without_note_and_bzimage_are_entered_in_64_bit_mode() {
    let memory = memory();
    assert_eq!(
        load(&elf(4096, false), None, "", &memory).unwrap(),
        Entry::Linux64(GuestAddress(0x0100_0000))
    );
    let entry = load(&bzimage(1 << 20), Some(&[1; 100]), "root=/dev/vda", &memory).unwrap();
    assert_eq!(entry, Entry::Linux64(GuestAddress(layout::HIGH_RAM_START + 0x200)));
    let zero_page = layout::ZERO_PAGE;
    assert_eq!(u32_at(&memory, zero_page + 0x228), layout::CMDLINE_START as u32);
    assert_eq!(u32_at(&memory, zero_page + 0x21c), 100);
    assert_eq!(u64_at(&memory, zero_page + 0x70), layout::ACPI_START);
    let entries: u8 = memory.read_obj(GuestAddress(zero_page + 0x1e8)).unwrap();
    assert_eq!(entries, 3);
}

#[test]
fn unbootable_files_are_refused_with_the_reason() {
    let memory = memory();
    let problem = |kernel: &[u8]| load(kernel, None, "", &memory).unwrap_err().to_string();
    assert!(problem(b"").contains("empty"));
    assert!(problem(&[0; 4096]).contains("neither ELF nor bzImage"));
    assert!(problem(b"\x7fELF").contains("not a Linux kernel"));
    assert!(problem(&bzimage(1 << 20)[..0x300]).contains("not a Linux kernel"));
    assert!(problem(&bzimage(u32::MAX)).contains("--memory"));
    assert!(problem(&elf(1 << 40, true)).contains("--memory"));
    let missing =
        BootImage::open(Path::new("/nonexistent/vmlinuz"), None, "").unwrap_err().to_string();
    assert!(missing.contains("/nonexistent/vmlinuz") && missing.contains("kernel"), "{missing}");
    let directory = BootImage::open(Path::new("/tmp"), None, "").unwrap_err().to_string();
    assert!(directory.contains("directory"), "{directory}");
}

#[test]
fn an_initrd_or_command_line_that_does_not_fit_is_refused() {
    let memory = memory();
    let large = vec![0; RAM_BYTES as usize];
    let error = load(&elf(4096, true), Some(&large), "", &memory).unwrap_err();
    assert!(matches!(error, BootError::DoesNotFit { what: "initrd", .. }), "{error}");
    let error = load(&bzimage(4096), None, &"x".repeat(2048), &memory).unwrap_err();
    assert!(matches!(error, BootError::CmdlineTooLong { length: 2048, limit: 2047 }), "{error}");
}

#[test]
fn an_image_can_be_loaded_twice() {
    let (kernel, initrd) = (file(&elf(4096, true)), file(&[9; 5000]));
    let image = BootImage::open(kernel.path(), Some(initrd.path()), "quiet").unwrap();
    let (first, second) = (memory(), memory());
    let entry = image.load(&first, RAM_BYTES, GuestAddress(0)).unwrap();
    assert_eq!(image.load(&second, RAM_BYTES, GuestAddress(0)).unwrap(), entry);
    let module = u64_at(&second, u64_at(&second, layout::PVH_START_INFO + 16));
    assert_eq!(memory_byte(&second, module), 9);
}

fn memory_byte(memory: &GuestMemory, address: u64) -> u8 {
    memory.read_obj(GuestAddress(address)).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn no_file_makes_the_loader_panic(
        kind in 0u8..3,
        flips in prop::collection::vec((0usize..1024, any::<u8>()), 0..40),
        cut in 0usize..6000,
    ) {
        let mut bytes = match kind {
            0 => elf(4096, true),
            1 => bzimage(1 << 20),
            _ => vec![0; 2048],
        };
        for (position, value) in flips {
            bytes[position] = value;
        }
        bytes.truncate(cut.max(1));
        fuzz_kernel(&bytes);
    }
}
