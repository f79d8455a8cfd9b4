#!/usr/bin/perl
# The API of a machine without a balloon, as far as the daemon asks for it: monitor.pl SOCKET
use strict;
use warnings;
use IO::Socket::UNIX;

my $memory = 'x' x (64 << 20);
my $server = IO::Socket::UNIX->new(Local => shift, Listen => 8) or die "no socket: $!";
$SIG{CHLD} = 'IGNORE';
while (my $client = $server->accept) {
    next if fork;
    $client->autoflush(1);
    while (my $request = <$client>) {
        my ($length, $body) = (0, '');
        while (my $line = <$client>) {
            last if $line =~ /^\r?$/;
            $length = $1 if $line =~ /^content-length: (\d+)/i;
        }
        read $client, $body, $length;
        my ($status, $document) = (200, '{}');
        ($status, $document) = (404, '{}') if $request =~ m{ /balloon};
        $document = '{"state": "running", "memory_bytes": 268435456}' if $request =~ m{^GET /vm };
        print $client "HTTP/1.1 $status Said\r\nServer: ebb/1\r\nContent-Type: application/json\r\n",
            'Content-Length: ', length $document, "\r\n\r\n$document";
    }
    exit;
}
