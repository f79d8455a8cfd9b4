//! What a process still knows of its private keys after sessions over TLS.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use ebb_migration::session::TimeLimits;
use rustls_pki_types::PrivateKeyDer;
use rustls_pki_types::pem::PemObject;

use crate::certificates::{Authority, Files, Validity, tls};
use crate::drive;

const KEY_BYTES: usize = 32;
/// How long a destination waits for a source that it does not accept.
const PATIENCE: Duration = Duration::from_secs(1);
/// Hides the patterns from the search.
const MASK: u8 = 0xff;
/// Order of the curve P-256 (SEC 2 section 2.4.2), least significant part first.
const ORDER: [u64; 4] =
    [0xf3b9_cac2_fc63_2551, 0xbce6_faad_a717_9e84, 0xffff_ffff_ffff_ffff, 0xffff_ffff_0000_0000];

/// A form in which a program may have a private key.
struct Form {
    name: &'static str,
    masked: Vec<u8>,
}

fn form(name: &'static str, bytes: &[u8]) -> Form {
    Form { name, masked: bytes.iter().map(|byte| byte ^ MASK).collect() }
}

/// A private key in its file, in ASN.1 (SEC 1), as a number, and as one in Montgomery's form.
fn forms(files: &Files) -> Vec<Form> {
    let text = std::fs::read(&files.key).unwrap();
    let line = text.split(|&byte| byte == b'\n').nth(1).unwrap();
    let der = PrivateKeyDer::from_pem_slice(&text).unwrap();
    // OCTET STRING of 32 bytes, the first one.
    let at = der.secret_der().windows(2).position(|pair| pair == [4, KEY_BYTES as u8]).unwrap() + 2;
    let bytes = &der.secret_der()[at..at + KEY_BYTES];
    let number: Vec<u8> = bytes.iter().rev().copied().collect();
    let mut limbs = [0; 4];
    for (limb, bytes) in limbs.iter_mut().zip(number.chunks(8)) {
        *limb = u64::from_le_bytes(bytes.try_into().unwrap());
    }
    (0..256).for_each(|_| double(&mut limbs));
    let montgomery: Vec<u8> = limbs.iter().flat_map(|limb| limb.to_le_bytes()).collect();
    vec![
        form("text", &line[16..48]),
        form("ASN.1", bytes),
        form("number", &number),
        form("Montgomery", &montgomery),
    ]
}

/// Doubles a number modulo the order.
fn double(limbs: &mut [u64; 4]) {
    let carry = limbs[3] >> 63;
    for index in (0..4).rev() {
        limbs[index] = limbs[index] << 1 | if index > 0 { limbs[index - 1] >> 63 } else { 0 };
    }
    let mut less = *limbs;
    let mut borrow = false;
    for (limb, order) in less.iter_mut().zip(ORDER) {
        let (part, first) = limb.overflowing_sub(order);
        let (part, second) = part.overflowing_sub(u64::from(borrow));
        (*limb, borrow) = (part, first || second);
    }
    if carry == 1 || !borrow {
        *limbs = less;
    }
}

/// The forms that are in this process's memory, but for the stack of this thread.
fn found(forms: &[Form]) -> Vec<String> {
    let memory = File::open("/proc/self/mem").unwrap();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let mut buffer = vec![0_u8; 1 << 20];
    let own = buffer.as_ptr_range();
    let (own, here) = (own.start as usize..own.end as usize, std::ptr::from_ref(&own) as usize);
    let mut found = Vec::new();
    for map in maps.lines().filter(|map| map.contains(" rw")) {
        let (start, end) = map.split(' ').next().unwrap().split_once('-').unwrap();
        let [start, end] = [start, end].map(|text| usize::from_str_radix(text, 16).unwrap());
        if (start..end).contains(&here) {
            continue;
        }
        let mut at = start;
        while at < end {
            let length = buffer.len().min(end - at);
            // It may be gone by now.
            let Ok(length) = memory.read_at(&mut buffer[..length], at as u64) else { break };
            for form in forms {
                let is = |window: &[u8]| {
                    window.iter().zip(&form.masked).all(|(byte, masked)| byte ^ MASK == *masked)
                };
                for (offset, window) in buffer[..length].windows(KEY_BYTES).enumerate() {
                    if is(window) && !own.contains(&(at + offset)) {
                        found.push(format!("{} at {:#x} in {map}", form.name, at + offset));
                    }
                }
            }
            at += if length > KEY_BYTES && at + length < end { length - KEY_BYTES } else { length };
        }
    }
    found
}

/// Runs one side of a session in a thread; returns when it has ended. The thread stays until the
/// scope ends.
fn stays<'a>(
    scope: &'a thread::Scope<'a, '_>,
    side: impl FnOnce() + Send + 'a,
) -> (mpsc::Receiver<()>, mpsc::Sender<()>) {
    let (has_ended, ended) = mpsc::channel();
    let (end, may_end) = mpsc::channel::<()>();
    scope.spawn(move || {
        side();
        drop(has_ended);
        let _dropped = may_end.recv();
    });
    (ended, end)
}

#[test]
fn nothing_is_left_of_private_keys() {
    let authority = Authority::new("authority");
    let [at_destination, at_source] =
        ["127.0.0.1", "a.example"].map(|name| authority.files(name, &Validity::Now));
    let all: Vec<Form> = [&at_destination, &at_source].into_iter().flat_map(forms).collect();
    // What is in use is found.
    let text = std::fs::read(&at_source.key).unwrap();
    let key = PrivateKeyDer::from_pem_slice(&text).unwrap();
    let signer = rustls::crypto::ring::sign::any_ecdsa_type(&key).unwrap();
    let in_use = found(&all);
    for form in ["text", "ASN.1", "Montgomery"] {
        assert!(in_use.iter().any(|found| found.starts_with(form)), "no {form} in {in_use:#?}");
    }
    drop((text, key, signer));
    assert_eq!(found(&all), Vec::<String>::new());
    for at_source in [at_source, Authority::new("other").files("a.example", &Validity::Now)] {
        let all: Vec<Form> = [&at_destination, &at_source].into_iter().flat_map(forms).collect();
        let limits = TimeLimits::default();
        let listener = drive::listen(&drive::loopback(), &tls(&at_destination), &limits);
        let address = listener.address().clone();
        thread::scope(|scope| {
            let destination = stays(scope, || drop(drive::destination_within(listener, PATIENCE)));
            let source = stays(scope, || drop(drive::source(&address, &tls(&at_source), &limits)));
            for (ended, _) in [&destination, &source] {
                let _dropped = ended.recv();
            }
            assert_eq!(found(&all), Vec::<String>::new());
        });
    }
}
